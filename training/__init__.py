"""Training scripts, recipes and launch templates; installed as `hf_vit.scripts`."""
