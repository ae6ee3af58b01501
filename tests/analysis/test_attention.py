"""Attention: values by hand on 2 x 2 grids, the authors' formulas, every pooling and stem."""

import re

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from hf_vit import analysis
from hf_vit.analysis.attention import (
    LAYER_BYTES,
    batches,
    collect_attentions,
    encoder_of,
    layer_mixing,
    patch_pixels,
    summed_distances,
)
from hf_vit.models.configuration_hf_vit import HfViTConfig
from hf_vit.models.image_processing_hf_vit import patchify
from hf_vit.models.modeling_hf_vit_variants import HfViTBackbone, HfViTModel
from hf_vit.models.modeling_masked_patch_prediction import HfViTForMaskedPatchPrediction

from ..tiny_models import TINY, images, tiny


@torch.no_grad()
def attentions_of(model, pixel_values) -> np.ndarray:
    """Return the model's attentions in float64: (layers, images, heads, tokens, tokens)."""
    outputs = encoder_of(model)(pixel_values, output_attentions=True)
    return np.stack([attentions.numpy() for attentions in outputs.attentions]).astype(np.float64)


def test_distance_by_hand_on_a_2_x_2_grid():
    """Patches of 3 x 4 pixels: neighbors are 3 or 4 apart, the diagonal is 5."""
    config = HfViTConfig(hidden_size=8, num_attention_heads=2, image_size=(6, 8), patch_size=(3, 4))
    attentions = torch.zeros(1, 2, 5, 5)
    attentions[0, 0] = torch.eye(5)  # the first head looks at itself
    attentions[0, 1, :, 4] = 0.5  # the second: half at the patch in the last corner, half at the class token
    attentions[0, 1, :, 0] = 0.5
    by_hand = (5 + 3 + 4 + 0) / 4
    assert summed_distances(attentions, config, (6, 8), renormalize=False).tolist() == [0, 0.5 * by_hand]
    assert summed_distances(attentions, config, (6, 8), renormalize=True).tolist() == [0, by_hand]


def test_uniform_attention_by_hand():
    """With zero queries attention is uniform: 3 x 2 patches of 4 x 6 pixels and the class token."""
    model = tiny(image_size=(8, 12))
    for layer in model.vit.layers:
        torch.nn.init.zeros_(layer.attention.q_proj.weight)
        torch.nn.init.zeros_(layer.attention.q_proj.bias)
    pixel_values = images(model)
    by_hand = (4 + 6 + np.hypot(4, 6)) / 5
    np.testing.assert_allclose(analysis.attention_distance(model, pixel_values), np.full((3, 2), by_hand), rtol=1e-6)
    np.testing.assert_allclose(analysis.attention_rollout(model, pixel_values), np.full((2, 2, 2), 0.25), rtol=1e-6)
    np.testing.assert_allclose(analysis.attention_maps(model, pixel_values), np.full((2, 3, 2, 2, 2), 0.2), rtol=1e-6)


def test_distances_equal_the_authors_formula(model):
    """google-research/vision_transformer, issue 162, for any grid."""
    pixel_values, prefix = images(model, batch=3), model.config.num_prefix_tokens
    places = np.indices(model.config.grid_size).reshape(2, -1) * np.array(patch_pixels(model.config))[:, None]
    distances = np.hypot(*(places[:, :, None] - places[:, None]))
    attentions = attentions_of(model, pixel_values)[..., prefix:, prefix:]
    expected = (attentions * distances).sum(axis=-1).mean(axis=(1, 3))
    assert expected.shape == (model.config.num_hidden_layers, 2)
    np.testing.assert_allclose(analysis.attention_distance(model, pixel_values), expected, rtol=2e-6)


@pytest.mark.parametrize("identity", [True, False])
def test_rollout_is_the_product_of_the_layers(model, identity):
    pixel_values, prefix = images(model), model.config.num_prefix_tokens
    rollout = np.eye(attentions_of(model, pixel_values).shape[-1])
    for attentions in attentions_of(model, pixel_values).mean(axis=2):
        mixing = attentions + identity * np.eye(attentions.shape[-1])
        rollout = mixing / mixing.sum(axis=-1, keepdims=True) @ rollout
    (_, weights, grid) = next(iter(layer_mixing(model, pixel_values, identity, None, False)))
    patches = np.einsum("bt,btp->bp", weights.numpy().astype(np.float64), rollout)[:, prefix:]
    expected = (patches / patches.sum(axis=1, keepdims=True)).reshape(2, *grid)
    np.testing.assert_allclose(analysis.attention_rollout(model, pixel_values, identity=identity), expected, rtol=1e-5)


@pytest.mark.parametrize("pooling", ["mean", "map", "none"])
def test_pooling_of_patches_only_leaves_the_class_token_out(pooling):
    model = tiny(pooling=pooling, use_cls_token=True, pool_patches_only=pooling != "none")
    (_, weights, _) = next(iter(layer_mixing(model, images(model), True, None, False)))
    assert weights[0, 0] == 0
    torch.testing.assert_close(weights.sum(dim=1), torch.ones(2))


def test_maps_are_rows_of_the_attentions(model):
    pixel_values, prefix = images(model), model.config.num_prefix_tokens
    attentions = attentions_of(model, pixel_values)
    rows, columns = model.config.grid_size
    query = attentions[..., 0, :] if prefix else attentions.mean(axis=-2)
    expected = np.moveaxis(query[..., prefix:], 0, 1).reshape(2, -1, 2, rows, columns)
    np.testing.assert_allclose(analysis.attention_maps(model, pixel_values), expected, rtol=1e-5)
    patch = attentions[..., prefix + columns + 2, prefix:]  # row 1, column 2
    if rows > 1:
        found = analysis.attention_maps(model, pixel_values, query=(1, 2))
        np.testing.assert_allclose(found, np.moveaxis(patch, 0, 1).reshape(2, -1, 2, rows, columns), rtol=1e-5)


@pytest.mark.parametrize("function", [analysis.attention_distance, analysis.attention_rollout, analysis.attention_maps])
def test_batches_and_data_loaders_give_the_same(function):
    model = tiny()
    pixel_values = images(model, batch=5)
    expected = function(model, pixel_values)
    labeled = DataLoader(TensorDataset(pixel_values, torch.arange(5)), batch_size=2)
    sources = [pixel_values.numpy(), {"pixel_values": pixel_values}, [{"pixel_values": pixel_values}], labeled]
    for source in sources:
        np.testing.assert_allclose(function(model, source, batch_size=2), expected, rtol=1e-5)
    np.testing.assert_allclose(function(model, iter(labeled), progress=True), expected, rtol=1e-5)


def test_batches_have_as_many_images_as_fit_into_the_limit():
    """For B/16, 12 heads of 197 x 197 attentions in float32 are 1.86 MB for each image."""
    encoder = torch.nn.Linear(1, 1)
    encoder.config = HfViTConfig()
    sizes = [len(batch) for batch in batches(encoder, torch.zeros(40, 3, 224, 224))]
    assert sizes == [18, 18, 4]
    assert 17 < LAYER_BYTES / (12 * 197**2 * 4) < 19


def test_images_of_another_size_than_the_models():
    model = tiny()
    pixel_values = torch.randn(2, 3, 12, 24)
    assert analysis.attention_rollout(model, pixel_values).shape == (2, 3, 4)
    assert analysis.attention_distance(model, [pixel_values, images(model)]).shape == (3, 2)
    with pytest.raises(ValueError, match="13"):
        analysis.attention_rollout(model, torch.randn(2, 3, 13, 24))


def test_native_images_of_one_shape():
    model = tiny()
    pixel_values = images(model)
    patches = torch.nn.functional.pad(patchify(pixel_values, (4, 6)), (0, 0, 0, 7))
    native = {"pixel_values": patches, "spatial_shapes": torch.tensor([[5, 6], [5, 6]])}
    expected = analysis.attention_rollout(model, pixel_values)
    np.testing.assert_array_equal(analysis.attention_rollout(model, native), expected)
    native["spatial_shapes"] = torch.tensor([[5, 6], [6, 5]])
    with pytest.raises(ValueError, match=r"\[5, 6\]"):
        analysis.attention_rollout(model, native)


@pytest.mark.parametrize("model_class", [HfViTModel, HfViTBackbone, HfViTForMaskedPatchPrediction])
def test_encoders_backbones_and_masked_patch_prediction(model_class):
    model = model_class(HfViTConfig(**TINY)).eval()
    assert analysis.attention_rollout(model, images(model)).shape == (2, 5, 6)
    assert analysis.attention_distance(torch.nn.Sequential(model), images(model)).shape == (3, 2)


def test_the_model_is_unchanged_afterwards():
    model = tiny(hidden_dropout_prob=0.5, attention_probs_dropout_prob=0.5).train()
    model.vit.layers[1].eval()
    modes = [module.training for module in model.modules()]
    first, second = (analysis.attention_distance(model, images(model)) for _ in range(2))
    np.testing.assert_array_equal(first, second)  # without dropout
    assert [module.training for module in model.modules()] == modes
    with pytest.raises(ZeroDivisionError):
        collect_attentions(model.vit, images(model), lambda attentions: 1 / 0)
    assert [module.training for module in model.modules()] == modes
    attention = model.vit.layers[0].attention
    assert not (attention._forward_hooks)
    assert not (attention._forward_pre_hooks)


def test_bfloat16_models():
    model = tiny()
    expected = analysis.attention_distance(model, images(model))
    found = analysis.attention_distance(model.to(torch.bfloat16), images(model))
    np.testing.assert_allclose(found, expected, rtol=0.03)


def test_bad_input_is_refused():
    model = tiny()
    for shape in ((3, 20, 36), (2, 4, 20, 36)):
        with pytest.raises(ValueError, match=re.escape(str(shape))):
            analysis.attention_distance(model, torch.zeros(shape))
    with pytest.raises(ValueError, match="pixel values"):
        analysis.attention_distance(model, torch.full((1, 3, 20, 36), torch.nan))
    with pytest.raises(ValueError, match=r"\(5, 0\)"):
        analysis.attention_maps(model, images(model), query=(5, 0))
    with pytest.raises(ValueError, match="Linear"):
        analysis.attention_distance(torch.nn.Linear(1, 1), images(model))


@pytest.mark.parametrize("function", [analysis.attention_distance, analysis.attention_rollout])
def test_weights_that_are_nan_are_named(function):
    model = tiny()
    model.vit.layers[1].mlp.fc1.weight.data[:2, 3] = torch.nan
    with pytest.raises(ValueError, match=r"vit.layers.1.mlp.fc1.weight"):
        function(model, images(model))
