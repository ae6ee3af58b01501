"""torchvision's ViTs at another image size, against torchvision's own resampling where it is installed."""

import pytest
import torch

from hf_vit.conversion import convert

from ..paths import PEERS


def test_positions_at_another_size_are_torchvisions():
    vision_transformer = pytest.importorskip("torchvision.models.vision_transformer", exc_type=Exception)
    stored = torch.load(PEERS / "torchvision.pth", weights_only=True)
    arrays = {name: array.float() for name, array in stored.items()}
    options = {"num_attention_heads": 2}
    small, _ = convert(PEERS / "torchvision.pth", **options)
    patch = arrays["conv_proj.weight"].shape[-1]
    side = small.config.grid_size[0] + 3
    large, _ = convert(PEERS / "torchvision.pth", image_size=patch * side, **options)
    theirs = vision_transformer.interpolate_embeddings(patch * side, patch, arrays)
    found = large.vit.embeddings.position_embeddings
    torch.testing.assert_close(found, theirs["encoder.pos_embedding"], rtol=0, atol=1e-6)
