"""AxialResNet: attention compared with axial-deeplab's output, and the structure of the network."""

import re

import numpy as np
import pytest
import torch
from torch import nn

from hf_vit import HfBiTConfig, HfBiTForImageClassification
from hf_vit.conversion import ConversionError, export
from hf_vit.models.axial_attention import AxialAttention
from hf_vit.models.configuration_hf_bit import ORIGINALS
from hf_vit.models.resnet_stem import StandardizedConv2d

from ..paths import PEERS
from ..tiny_models import BIT_PIXELS, tiny_bit

THEIRS = {
    "qkv.weight": "qkv_transform.weight",
    "positions": "relative",
    "norm_qkv": "bn_qkv",
    "norm_logits": "bn_similarity",
    "norm_output": "bn_output",
}
AXIAL = {"layer_type": "bottleneck", "spatial_mixing": "axial_attention"}


@pytest.fixture(scope="module")
def golden():
    with np.load(PEERS / "axial_attention.npz") as arrays:
        return {name: torch.from_numpy(arrays[name]) for name in arrays}


def original_attention(golden, axis: str) -> AxialAttention:
    """The weights of the golden; its norms have as many groups as channels (see make_axial_attention.py)."""
    _, channels, rows, columns = golden["input"].shape
    attention = AxialAttention(channels, rows if axis == "columns" else columns, axis == "columns", 1e-5).double()
    state = {}
    for name, parameter in attention.state_dict().items():
        prefix, _, kind = name.rpartition(".")
        theirs = THEIRS.get(name) or f"{THEIRS[prefix]}.{kind}"
        state[name] = golden[f"{axis}/{theirs}"].reshape(parameter.shape)
    attention.load_state_dict(state)
    for norm in (attention.norm_qkv, attention.norm_output):
        norm.num_groups = norm.num_channels
    return attention


@pytest.mark.parametrize("axis", ["columns", "rows"])
def test_attention_equals_axial_deeplab(golden, axis):
    with torch.no_grad():
        output = original_attention(golden, axis)(golden["input"])
    torch.testing.assert_close(output, golden[f"{axis}/output"], rtol=0, atol=1e-12)


def test_every_3x3_convolution_is_replaced_and_nothing_else():
    axial, plain = (
        tiny_bit(layer_type="bottleneck", spatial_mixing=mixing) for mixing in ("axial_attention", "convolution")
    )
    assert (3, 3) not in [module.kernel_size for module in axial.modules() if isinstance(module, StandardizedConv2d)]
    ours, theirs = (
        [states.shape for states in model(BIT_PIXELS, output_hidden_states=True).hidden_states]
        for model in (axial, plain)
    )
    assert ours == theirs
    ours, theirs = (
        {name: value.shape for name, value in model.state_dict().items() if not re.search(r"\.(conv2|norm2)\.", name)}
        for model in (axial, plain)
    )
    assert ours == theirs


def test_parameters_of_the_resnet_50():
    """For each unit of C channels, two attentions: 2 C^2 of the projection, C / 4 (2 span - 1) positions, norms."""
    sizes = {"layer_type": "bottleneck", "num_labels": 1000}
    with torch.device("meta"):
        axial = HfBiTForImageClassification(HfBiTConfig.from_variant("R50x1", **{**sizes, **AXIAL}))
        plain = HfBiTForImageClassification(HfBiTConfig.from_variant("R50x1", **sizes))
    spans = [[56, 56, 56], [56, 28, 28, 28], [28, 14, 14, 14, 14, 14], [14, 7, 7]]
    difference = 0
    for stage, its_spans in enumerate(spans):
        channels = 64 * 2**stage
        for span in its_spans:
            norms = 2 * (2 * channels + 3 * 8 + 2 * channels)
            difference += 2 * (2 * channels**2 + channels // 4 * (2 * span - 1) + norms)
            difference -= 9 * channels**2 + 2 * channels
    assert axial.num_parameters() - plain.num_parameters() == difference


def test_smaller_images_use_the_positions_in_the_middle_and_larger_ones_are_refused():
    torch.manual_seed(0)
    large, small = AxialAttention(16, 9, False, 1e-5), AxialAttention(16, 5, False, 1e-5)
    nn.init.normal_(large.positions)
    state = large.state_dict()
    small.load_state_dict({**state, "positions": state["positions"][:, 4:-4]})
    feature_map = torch.randn(2, 16, 3, 5)
    torch.testing.assert_close(large(feature_map), small(feature_map))
    with pytest.raises(ValueError, match=r"\b5\b"):
        AxialAttention(16, 4, False, 1e-5)(feature_map)


def test_a_saved_model_loads_and_exports_refuse_it(tmp_path):
    model = tiny_bit(**{**ORIGINALS["bit"], **AXIAL})
    model.save_pretrained(tmp_path / "model")
    again = HfBiTForImageClassification.from_pretrained(tmp_path / "model").eval()
    assert torch.equal(again(BIT_PIXELS).logits, model(BIT_PIXELS).logits)
    with pytest.raises(ValueError, match="512"):
        again.set_image_size(512)
    for to in ("jax", "timm", "transformers"):
        with pytest.raises(ConversionError, match="spatial_mixing"):
            export(model, tmp_path / to, to)
