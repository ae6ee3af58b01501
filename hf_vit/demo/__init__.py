"""`python -m hf_vit.demo`: the main job on real input, with no network; and the page of `hf-vit demo FOLDER`."""
