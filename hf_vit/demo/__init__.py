"""Offline demo `python -m hf_vit.demo` (convert, classify, fine-tune), and the page of `hf-vit demo FOLDER`."""
