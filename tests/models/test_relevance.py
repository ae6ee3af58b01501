"""Relevance for a class, against equations 5 and 6 of arXiv 2103.15679 in NumPy."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from transformers import ViTConfig, ViTForImageClassification

from hf_vit.loading import load
from hf_vit.models.relevance import NoRelevance, class_relevance

from ..tiny_models import SIZES, VARIANTS, images, randomize, tiny, tiny_bit

TARGETS = [7, 2]


def by_definition(attentions, gradients, first_row: np.ndarray) -> np.ndarray:
    """R = I; R += mean over heads of max(gradient * A, 0) @ R in each layer; then the weighted sum of its rows.

    Args:
        attentions, gradients: of each layer, (heads, tokens, tokens)
        first_row: (tokens,), the weights of the rows.
    """
    relevance = np.eye(len(first_row))
    for attention, gradient in zip(attentions, gradients, strict=True):
        mixing = np.maximum(gradient * attention, 0).mean(axis=0)
        relevance = relevance + mixing @ relevance
    return first_row @ relevance


def expected_maps(outputs, extra: list[torch.Tensor], weigh) -> np.ndarray:
    """Maps (images, tokens) by the definition, from outputs with attentions that have a graph.

    Args:
        weigh: function of the gradients of `extra`, for one image, that returns its first row.
    """
    chosen = outputs.logits[range(len(TARGETS)), TARGETS].sum()
    layers = outputs.attentions
    gradients = torch.autograd.grad(chosen, [*layers, *extra])
    number = range(len(TARGETS))
    of_layers = [[layer[n].detach().double().numpy() for layer in layers] for n in number]
    of_gradients = [[gradient[n].double().numpy() for gradient in gradients[: len(layers)]] for n in number]
    rows = [weigh(n, gradients[len(layers) :]) for n in number]
    return np.stack([by_definition(*one) for one in zip(of_layers, of_gradients, rows, strict=True)])


def test_a_model_of_transformers(tmp_path):
    """With its own attentions and gradients."""
    sizes = {**SIZES, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6}
    config = ViTConfig(**sizes, image_size=(20, 36), patch_size=4, num_labels=11, attn_implementation="eager")
    theirs = randomize(ViTForImageClassification(config))
    theirs.save_pretrained(tmp_path)
    ours, _ = load(tmp_path)
    pixel_values = torch.randn(2, 3, 20, 36, generator=torch.Generator().manual_seed(0))
    outputs = theirs(pixel_values, output_attentions=True)
    first_row = np.eye(1, outputs.attentions[0].shape[-1])[0]
    expected = expected_maps(outputs, [], lambda *_: first_row)[:, 1:]
    found = class_relevance(ours, pixel_values, torch.tensor(TARGETS))
    assert found.shape == (2, 5, 9)
    np.testing.assert_allclose(found.flatten(1).numpy(), expected, rtol=1e-4, atol=1e-5 * expected.max())
    assert not np.allclose(found[0], class_relevance(ours, pixel_values, torch.tensor([3, 2]))[0])


def plain_attention(query, key, value, attn_mask=None, kept=None):
    probabilities = (query @ key.transpose(2, 3) * key.shape[-1] ** -0.5).softmax(dim=-1)
    kept.append(probabilities)
    return probabilities @ value


POOLED = [
    "cls",
    "mean",
    "map",
    "sincos",
    "no positions",
    "learned2d",
    "every layer",
    "relative",
    "hybrid",
    "stem alone",
]


@pytest.mark.parametrize("name", POOLED)
def test_poolings_and_positions(name, monkeypatch):
    """The attention pooling's probe is computed with a softmax here, whose gradient autograd gives."""
    model = tiny(**VARIANTS[name])
    pixel_values = images(model)
    probe: list[torch.Tensor] = []
    with monkeypatch.context() as patch:
        if model.config.pooling == "map":
            patch.setattr(F, "scaled_dot_product_attention", lambda *a, **o: plain_attention(*a, **o, kept=probe))
        outputs = model(pixel_values, output_attentions=True)
    tokens = outputs.attentions[0].shape[-1]

    def weigh(number, gradients):
        if model.config.pooling == "map":
            product = gradients[0][number].double() * probe[0][number].detach().double()
            return product.clamp(min=0).mean(dim=0)[0].numpy()
        return np.eye(1, tokens)[0] if model.config.pooling == "cls" else np.full(tokens, 1 / tokens)

    rows, columns = model.config.grid_size
    expected = expected_maps(outputs, probe, weigh)[:, -rows * columns :]
    found = class_relevance(model, pixel_values, torch.tensor(TARGETS))
    np.testing.assert_allclose(found.flatten(1).numpy(), expected, rtol=1e-3, atol=1e-5 * expected.max())
    assert not model.training


def test_frozen_weights_and_the_outer_mode_do_not_matter():
    model = tiny().requires_grad_(False)
    pixel_values = images(model)
    expected = class_relevance(tiny(), pixel_values, torch.tensor(TARGETS))
    with torch.inference_mode():
        found = class_relevance(model, pixel_values, torch.tensor(TARGETS))
    torch.testing.assert_close(found.clone(), expected)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("name", ["none", "axial", "ResNet"])
def test_models_without_relevance(name):
    model = tiny_bit() if name == "ResNet" else tiny(**VARIANTS[name])
    with pytest.raises(NoRelevance):
        class_relevance(model, torch.zeros(1, 3, *model.config.image_size), torch.tensor([0]))
