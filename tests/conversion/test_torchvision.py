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


# hidden size, heads, MLP, patch and image size of vit_b_16, vit_b_32, vit_l_16, vit_l_32 and vit_h_14
ARCHITECTURES = {
    "vit_b_16": (768, 12, 3072, 16, 224),
    "vit_b_32": (768, 12, 3072, 32, 224),
    "vit_l_16": (1024, 16, 4096, 16, 224),
    "vit_l_32": (1024, 16, 4096, 32, 224),
    "vit_h_14": (1280, 16, 5120, 14, 224),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "vit_b_32" else pytest.mark.slow) for name in ARCHITECTURES]
)
def test_an_architecture_computes_what_torchvision_does(tmp_path, name):
    vision_transformer = pytest.importorskip("torchvision.models.vision_transformer", exc_type=Exception)
    width, heads, mlp, patch, size = ARCHITECTURES[name]
    torch.manual_seed(0)
    theirs = vision_transformer.VisionTransformer(size, patch, 2, heads, width, mlp, num_classes=5).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.03 * torch.randn_like(parameter))
    torch.save(theirs.state_dict(), tmp_path / "theirs.pth")
    ours, _ = convert(tmp_path / "theirs.pth")
    pixel_values = torch.randn(1, 3, size, size)
    with torch.no_grad():
        expected = theirs(pixel_values)
        difference = (ours(pixel_values).logits - expected).abs().max()
    assert difference < 1e-5 * expected.abs().max()
