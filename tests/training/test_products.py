import copy

import pytest
import torch
from torch import nn

from hf_vit.training.products import OneDNNLinear, use_onednn

from ..test_modeling import images, tiny


def layers(bias=True) -> tuple[nn.Linear, nn.Linear]:
    """The same weights, with oneDNN in float32 and with torch in float64."""
    torch.manual_seed(1)
    ours = nn.Linear(14, 22, bias=bias)
    theirs = copy.deepcopy(ours).double()
    use_onednn(ours)
    assert isinstance(ours.forward, OneDNNLinear)
    return ours, theirs


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(14,), (5, 14), (3, 5, 14)], ids=str)
def test_against_float64(bias, shape):
    ours, theirs = layers(bias)
    tokens = torch.randn(shape, requires_grad=True)
    wide = tokens.detach().double().requires_grad_()
    for layer, x in ((ours, tokens), (theirs, wide)):
        layer(x).square().sum().backward()
    torch.testing.assert_close(ours(tokens).double(), theirs(wide), rtol=0, atol=1e-5)
    torch.testing.assert_close(tokens.grad.double(), wide.grad, rtol=1e-5, atol=1e-5)
    for parameter, reference in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad.double(), reference.grad, rtol=1e-5, atol=1e-5)


def test_slices_and_broadcast_gradients():
    ours, theirs = layers()
    tokens = torch.randn(2, 9, 28)[:, ::2, 3:17].requires_grad_()
    wide = tokens.detach().double().requires_grad_()
    for layer, x in ((ours, tokens), (theirs, wide)):
        layer(x).mean().backward()  # the gradient is one number, expanded
    torch.testing.assert_close(tokens.grad.double(), wide.grad, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(ours.weight.grad.double(), theirs.weight.grad, rtol=1e-5, atol=1e-7)


def test_frozen_weights_get_no_gradient():
    ours, _ = layers()
    ours.weight.requires_grad_(False)
    ours(torch.randn(5, 14)).sum().backward()
    assert ours.weight.grad is None
    assert ours.bias.grad is not None


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_are_left_to_torch(dtype):
    ours, theirs = layers()
    tokens = torch.randn(5, 14, dtype=dtype)
    assert torch.equal(ours.to(dtype)(tokens), theirs.to(dtype)(tokens))


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_a_models_gradients(pooling):
    model = tiny(pooling=pooling).train()
    other = copy.deepcopy(model)
    use_onednn(other)
    for each in (model, other):
        each(images(model)).logits.square().sum().backward()
    gradients = [[parameter.grad for parameter in each.parameters()] for each in (model, other)]
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-4)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(other(images(model)).logits, model(images(model)).logits, rtol=0, atol=0)
