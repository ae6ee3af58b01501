"""Scripts that read as a page, their recipes and launch templates; installed as `hf_vit.scripts`."""
