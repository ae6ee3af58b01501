"""Attention distance and rollout in float64 NumPy, written from their definitions, on the original's own tokens.

The input of the first layer is the output of the original JAX code (`embedded`, also behind a ResNet stem). From there,
NumPy computes every attention with the arrays of the checkpoint. Its final output equals that of the original.
"""

import re

import numpy as np
import pytest

from hf_vit import analysis
from hf_vit.conversion import convert

from ..paths import golden_runs

NAMES = [
    "hybrid_stem", "hybrid_stem@61x62", "hybrid_stem_rep_gap", "hybrid_r2222", "hybrid_r2222@40x57", "hybrid_r349",
    "hybrid_r349@53x62", "bv_map", "bv_tok", "vit_gap", "vit_linen", "vit_token@16x64",
]  # fmt: skip
RUNS = {run["id"]: run for run in golden_runs("vit")}


def part(arrays: dict, pattern: str) -> dict:
    """Return the arrays below a module whose name matches, by the rest of their names."""
    return {re.sub(f"^{pattern}/", "", name): array for name, array in arrays.items() if re.match(f"{pattern}/", name)}


def layer_norm(states: np.ndarray, arrays: dict) -> np.ndarray:
    centered = states - states.mean(axis=-1, keepdims=True)
    return centered / np.sqrt(states.var(axis=-1, keepdims=True) + 1e-6) * arrays["scale"] + arrays["bias"]


def mlp(states: np.ndarray, arrays: dict) -> np.ndarray:
    hidden = states @ arrays["Dense_0/kernel"] + arrays["Dense_0/bias"]
    hidden = hidden * (1 + np.tanh(np.sqrt(2 / np.pi) * (hidden + 0.044715 * hidden**3))) / 2
    return hidden @ arrays["Dense_1/kernel"] + arrays["Dense_1/bias"]


def attend(queries: np.ndarray, states: np.ndarray, arrays: dict) -> tuple[np.ndarray, np.ndarray]:
    """Return the output (images, queries, width) and the attention (images, heads, queries, tokens)."""
    query, key, value = (
        np.einsum("btc,chd->bhtd", tokens, arrays[f"{name}/kernel"]) + arrays[f"{name}/bias"][:, None]
        for name, tokens in (("query", queries), ("key", states), ("value", states))
    )
    scores = np.exp(np.einsum("bhqd,bhkd->bhqk", query, key) / np.sqrt(query.shape[-1]))
    attention = scores / scores.sum(axis=-1, keepdims=True)
    attended = np.einsum("bhqk,bhkd,hdc->bqc", attention, value, arrays["out/kernel"])
    return attended + arrays["out/bias"], attention


def encode(arrays: dict, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the output of the final LayerNorm, and the attentions: (layers, images, heads, tokens, tokens)."""
    attentions = []
    while any(name.startswith(f"Transformer/encoderblock_{len(attentions)}/") for name in arrays):
        block = part(arrays, f"Transformer/encoderblock_{len(attentions)}")
        normed = layer_norm(tokens, part(block, "LayerNorm_0"))
        attended, attention = attend(normed, normed, part(block, r"MultiHeadDotProductAttention_\d"))
        tokens = tokens + attended
        tokens = tokens + mlp(layer_norm(tokens, part(block, "LayerNorm_[12]")), part(block, r"MlpBlock_\d"))
        attentions.append(attention)
    return layer_norm(tokens, part(arrays, "Transformer/encoder_norm")), np.stack(attentions)


def pool(arrays: dict, encoded: np.ndarray, classifier: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the input of the head, and the weight of each token in it, (images, tokens)."""
    share = np.zeros(encoded.shape[:2])
    if classifier in ("token", "tok"):
        share[:, 0] = 1
    elif classifier == "gap":
        share[:] = 1 / encoded.shape[1]
    else:  # MAPHead of big_vision: the probe attends to the tokens, and has no residual connection
        head = part(arrays, "MAPHead_0")
        probe = np.broadcast_to(head["probe"], (len(encoded), 1, encoded.shape[-1]))
        pooled, attention = attend(probe, encoded, part(head, "MultiHeadDotProductAttention_0"))
        pooled = pooled + mlp(layer_norm(pooled, part(head, "LayerNorm_0")), part(head, "MlpBlock_0"))
        return pooled[:, 0], attention[:, :, 0].mean(axis=1)
    return np.einsum("bt,btc->bc", share, encoded), share


def steps_of_the_stem(run: dict) -> int:
    """Return the image pixels of one step on the stem's map: root, max-pool and each later stage halve the map."""
    return 1 if run["resnet"] is None else 4 * 2 ** max(len(run["resnet"]["num_layers"]) - 1, 0)


@pytest.fixture(params=NAMES)
def case(request, goldens):
    """A golden run: its arrays in float64, its expected outputs, and our model of the checkpoint."""
    run = RUNS[request.param]
    with np.load(goldens / run["checkpoint"]) as arrays, np.load(goldens / run["expected"]) as expected:
        arrays = {name: arrays[name].astype(np.float64) for name in arrays.files}
        expected = {name: expected[name].astype(np.float64) for name in expected.files}
    return run, arrays, expected, convert(goldens / run["checkpoint"], position_grid=tuple(run["token_grid"]))[0]


def test_distance_and_rollout_equal_their_definitions(case):
    run, arrays, expected, model = case
    rows, columns = run["token_grid"]
    encoded, attentions = encode(arrays, expected["embedded"])
    pooled, share = pool(arrays, encoded, run["classifier"])
    np.testing.assert_allclose(encoded, expected["encoded"], atol=2e-5)  # NumPy computes what the original does
    np.testing.assert_allclose(pooled, expected["pooled"], atol=2e-5)

    pixel_values = np.moveaxis(expected["images"], -1, 1).astype(np.float32)
    prefix = attentions.shape[-1] - rows * columns
    across, along = (size * steps_of_the_stem(run) for size in run["patch_size"])
    row, column = np.divmod(np.arange(rows * columns), columns)
    apart = np.hypot(across * (row[:, None] - row), along * (column[:, None] - column))  # of patches, in pixels
    distances = np.einsum("libqk,qk->lb", attentions[..., prefix:, prefix:], apart)
    distances /= attentions.shape[1] * rows * columns
    np.testing.assert_allclose(analysis.attention_distance(model, pixel_values), distances, rtol=2e-4)

    for identity in (True, False):
        joint = np.eye(attentions.shape[-1])
        for attention in attentions.mean(axis=2):
            mixing = attention + identity * np.eye(attentions.shape[-1])
            joint = mixing / mixing.sum(axis=-1, keepdims=True) @ joint
        rollout = np.einsum("bt,btp->bp", share, joint)[:, prefix:]
        rollout = (rollout / rollout.sum(axis=1, keepdims=True)).reshape(-1, rows, columns)
        found = analysis.attention_rollout(model, pixel_values, identity=identity)
        np.testing.assert_allclose(found, rollout, rtol=2e-4)
