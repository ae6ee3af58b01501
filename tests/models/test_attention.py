"""Attention as a program of oneDNN, compared with the formula in float64."""

import numpy as np
import pytest
import torch

from hf_vit.models import inference, layers

from ..tiny_models import tiny

ZEN_4, ZEN_5, XEON = ("AuthenticAMD", 25, 17), ("AuthenticAMD", 26, 2), ("GenuineIntel", 6, 207)


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_torch_has_the_internal_onednn_operators():
    """They are internal to torch; this test fails with a version that lacks them."""
    assert layers.has_onednn_attention()


@torch.no_grad()
@pytest.mark.parametrize("logits", [2**19, 4 * 11])
@pytest.mark.parametrize("are_views", [True, False])
def test_onednn_attention_equals_the_formula_in_float64(monkeypatch, logits, are_views):
    """Cases: queries in one block, and in blocks of 4, 4 and 1; large logits; repeated calls; other layouts."""
    monkeypatch.setattr(layers, "LOGITS_PER_THREAD", logits)
    batch, heads, queries, tokens, head_dim = 3, 5, 9, 11, 6
    for threads, size in ((1, 1), (1, 40), (2, 1), (1, 1)):
        torch.set_num_threads(threads)
        lengths = (queries, tokens, tokens)
        states = [size * torch.randn(batch, length, heads * head_dim) for length in lengths]
        query, key, value = (x.unflatten(2, (heads, head_dim)).transpose(1, 2) for x in states)
        if not are_views:
            query, key, value = (x.contiguous() for x in (query, key, value))
        attended, _ = layers.onednn_attention_forward(torch.nn.Module(), query, key, value, scaling=0.3)
        q, k, v = (x.double().numpy() for x in (query, key, value))
        products = 0.3 * q @ k.swapaxes(2, 3)
        weights = np.exp(products - products.max(axis=3, keepdims=True))
        expected = (weights / weights.sum(axis=3, keepdims=True) @ v).swapaxes(1, 2)
        np.testing.assert_allclose(attended, expected, rtol=0, atol=1e-6 if size == 1 else 0.02)


@torch.no_grad()
def test_onednn_attention_is_used_in_optimised_models_without_gradients(monkeypatch):
    monkeypatch.setattr(layers, "mkl_is_narrower", lambda: True)
    model = tiny(attention_probs_dropout_prob=0.1)
    layer, query = model.vit.layers[0].attention, torch.zeros(2, 2, 5, 7)

    def is_chosen(states: torch.Tensor = query, is_plain: bool = True) -> bool:
        return layer.implementation(states, is_plain) is layers.onednn_attention_forward

    assert not is_chosen()
    model.optimize_for_inference()
    assert is_chosen()
    assert not is_chosen(is_plain=False)  # a mask or dropout
    assert not any(is_chosen(states) for states in (query.double(), query.bfloat16(), query.to("meta")))
    assert not any(is_chosen(states) for states in (query[:1], query[:, :, :1]))  # few heads, or one query
    assert not torch.func.vmap(lambda states: torch.tensor(is_chosen(states)))(query[None])
    with torch.autocast("cpu"):
        assert not is_chosen()
    with torch.enable_grad():
        assert not is_chosen()
    monkeypatch.setattr(layers, "mkl_is_narrower", lambda: False)
    assert not is_chosen()
    monkeypatch.undo()
    model.train().eval()
    assert not layer.is_optimized


@pytest.mark.parametrize(
    ("cpu", "mkl", "has_avx512", "expected"),
    [
        (ZEN_5, "", True, True),
        (ZEN_5, "", False, False),
        (ZEN_4, "", True, False),
        (XEON, "", True, False),
        (XEON, "AVX2", True, True),
        (XEON, "AVX512", True, False),
        (("", 0, 0), "", True, False),
        (XEON, "AVX2", False, False),
    ],
)
def test_detection_of_cpus_where_mkl_uses_narrower_vectors_than_onednn(monkeypatch, cpu, mkl, has_avx512, expected):
    """No time is measured. MKL at AVX2 on AMD's CPUs: benchmarks/RESULTS.md."""
    monkeypatch.setenv("MKL_ENABLE_INSTRUCTIONS", mkl)
    monkeypatch.setattr(inference, "onednn_has_avx512", lambda: has_avx512)
    monkeypatch.setattr(inference, "_cpu", lambda: cpu)
    assert inference.mkl_is_narrower.__wrapped__() == expected
