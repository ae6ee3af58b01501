"""Configurations, models and image processing. `hf_vit.push(..., code=True)` uploads all files of this folder."""
