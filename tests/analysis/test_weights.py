"""Filters compared with NumPy's eigenvectors, positions compared with their cosines."""

import numpy as np
import pytest
import torch

from hf_vit import analysis
from hf_vit.models.modeling_hf_vit import sincos2d

from ..tiny_models import VARIANTS, tiny, tiny_bit


def check_components(filters: np.ndarray, kernels: np.ndarray) -> None:
    """Compare filters with the eigenvectors of the covariance, by falling variance; the largest value is positive."""
    values, vectors = np.linalg.eigh(np.cov(kernels.reshape(len(kernels), -1), rowvar=False))
    expected = vectors[:, np.argsort(values)[::-1][: len(filters)]].T
    largest = np.abs(expected).argmax(axis=1)
    expected *= np.sign(expected[np.arange(len(filters)), largest])[:, None]
    np.testing.assert_allclose(filters, expected.reshape(filters.shape), atol=1e-6)


def test_filters_are_principal_components():
    model = tiny(hidden_size=34)
    filters = analysis.embedding_filters(model, components=28)
    assert filters.shape == (28, 3, 4, 6)
    check_components(filters, model.vit.embeddings.patch_embeddings.projection.weight.detach().double().numpy())


def test_filters_of_a_hybrid_are_those_of_the_standardized_root():
    model = tiny(hybrid=True)
    kernels = model.vit.embeddings.stem.convolution.weight.detach().double().numpy()
    kernels = kernels - kernels.mean(axis=(1, 2, 3), keepdims=True)
    kernels = kernels / (kernels.std(axis=(1, 2, 3), keepdims=True) + 1e-5)
    filters = analysis.embedding_filters(model, components=5)
    assert filters.shape == (5, 3, 7, 7)
    check_components(filters, kernels)


@pytest.mark.parametrize("layer_type", ["preactivation", "bottleneck"])
def test_filters_of_a_resnet_are_those_of_the_root_as_they_are_applied(layer_type):
    model = tiny_bit(layer_type=layer_type)
    kernels = model.bit.resnet.convolution.standardized_weight().detach().double().numpy()
    check_components(analysis.embedding_filters(model, components=6), kernels)


def test_bad_filters_are_refused():
    model = tiny()
    model.vit.embeddings.patch_embeddings.projection.weight.data[0, 0, 0, 0] = torch.inf
    with pytest.raises(ValueError, match=r"patch_embeddings.projection.weight"):
        analysis.embedding_filters(model, 3)


def cosines(positions: torch.Tensor, grid) -> np.ndarray:
    positions = positions.detach().double().numpy()
    lengths = np.linalg.norm(positions, axis=1)
    return (positions @ positions.T / np.outer(lengths, lengths)).reshape(*grid, *grid)


@pytest.mark.parametrize("name", ["cls", "mean", "hybrid"])
def test_similarity_of_learned_positions(name):
    model = tiny(**VARIANTS[name])
    positions = model.vit.embeddings.position_embeddings[0, model.config.num_prefix_tokens :]
    found = analysis.position_similarity(model)
    np.testing.assert_allclose(found, cosines(positions, model.config.grid_size), atol=1e-12)
    assert found[0, 1, 0, 1] == pytest.approx(1)


@pytest.mark.parametrize("kind", ["learned", "learned2d"])
@pytest.mark.parametrize("placement", ["input", "every_layer", "every_layer_shared"])
def test_similarity_is_the_mean_over_the_layers(kind, placement):
    model = tiny(position_embedding_type=kind, position_embedding_placement=placement)
    found = analysis.position_similarity(model, image_size=(12, 24))
    tables = model.vit.embeddings.position_embeddings_for((3, 4), torch.zeros(1))
    if placement != "input":
        assert tables is None
        tables = model.vit.layer_position_embeddings((3, 4))
    assert len(tables) == (3 if placement == "every_layer" else 1)
    expected = np.mean([cosines(table[1:], (3, 4)) for table in tables], axis=0)
    np.testing.assert_allclose(found, expected, atol=1e-12)


def test_similarity_of_fixed_positions():
    model = tiny(pooling="mean", position_embedding_type="sincos2d", hidden_size=16)
    found = analysis.position_similarity(model)
    np.testing.assert_allclose(found, cosines(sincos2d((5, 6), 16)[0].float(), (5, 6)), atol=1e-12)


def test_a_model_without_positions_is_refused():
    with pytest.raises(ValueError, match="HfViTForImageClassification"):
        analysis.position_similarity(tiny(position_embedding_type="none"))
    with pytest.raises(ValueError, match="relative"):
        analysis.position_similarity(tiny(position_embedding_type="relative"))
