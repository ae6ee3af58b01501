"""Batched inference: images of any kind in, classes or features out.

| question | file |
| --- | --- |
| how are images read, preprocessed and computed in batches? | `batches` |
| what do `hf_vit.predict`, `hf_vit.embed` and `hf_vit.Predictor` do? | `predictor` |
| which images are similar? | `search` |
"""
