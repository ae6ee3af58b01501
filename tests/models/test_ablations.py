"""Position embeddings of Table 8 and Axial-ViT, compared with loops in NumPy (float64)."""

import numpy as np
import pytest
import torch
from torch import nn

from hf_vit.conversion import ConversionError, export
from hf_vit.models.ablations import resize_relative_embeddings
from hf_vit.models.modeling_hf_vit_variants import HfViTBackbone, HfViTForImageClassification
from hf_vit.models.modeling_masked_patch_prediction import HfViTForMaskedPatchPrediction

from ..tiny_models import images, tiny

VARIANTS = {
    "1-D": {},
    "2-D": {"position_embedding_type": "learned2d"},
    "2-D without class token": {"position_embedding_type": "learned2d", "pooling": "mean"},
    "1-D in every layer": {"position_embedding_placement": "every_layer"},
    "1-D shared": {"position_embedding_placement": "every_layer_shared"},
    "2-D in every layer": {"position_embedding_type": "learned2d", "position_embedding_placement": "every_layer"},
    "2-D shared": {"position_embedding_type": "learned2d", "position_embedding_placement": "every_layer_shared"},
    "relative": {"position_embedding_type": "relative"},
    "relative without class token": {"position_embedding_type": "relative", "pooling": "mean"},
    "axial": {"attention_axes": "axial", "pooling": "mean", "num_hidden_layers": 2},
}
ROWS, COLUMNS = GRID = (5, 6)  # of the tiny models
UNSUPPORTED = r"position_embedding_(type|placement)=|attention_axes="


def every(names: str):
    """Parametrize with the variants whose names contain one of these words."""
    chosen = {name: fields for name, fields in VARIANTS.items() if any(word in name for word in names.split())}
    return pytest.mark.parametrize("fields", chosen.values(), ids=chosen)


def double(module: nn.Module) -> dict[str, np.ndarray]:
    return {name: parameter.detach().double().numpy() for name, parameter in module.named_parameters()}


def softmax(logits: np.ndarray) -> np.ndarray:
    exponentials = np.exp(logits - logits.max(-1, keepdims=True))
    return exponentials / exponentials.sum(-1, keepdims=True)


def attend(weights: dict[str, np.ndarray], tokens: np.ndarray, relative=0.0) -> np.ndarray:
    """Multi-head attention of one image, (tokens, hidden) -> the same; `relative` (queries, keys, 7) adds to keys."""
    projected = [tokens @ weights[f"{name}_proj.weight"].T + weights[f"{name}_proj.bias"] for name in ("q", "k", "v")]
    heads = []
    for query, key, value in zip(*(np.split(states, 2, axis=1) for states in projected), strict=True):
        logits = (query[:, None] * (key + relative)).sum(axis=-1) / np.sqrt(query.shape[1])
        heads.append(softmax(logits) @ value)
    return np.concatenate(heads, axis=1) @ weights["o_proj.weight"].T + weights["o_proj.bias"]


@torch.no_grad()
@every("2-D")
def test_2d_tables(fields):
    model = tiny(**fields)
    tables = model.vit.layer_position_embeddings or model.vit.embeddings.position_embeddings
    weights, prefix = double(tables), model.config.num_prefix_tokens
    ours = tables(GRID).double().numpy()
    layers = 3 if model.config.position_embedding_placement == "every_layer" else 1
    assert ours.shape == (layers, prefix + ROWS * COLUMNS, 14)
    row, column = np.divmod(np.arange(ROWS * COLUMNS), COLUMNS)
    expected = np.concatenate([weights["x"][:, column], weights["y"][:, row]], axis=-1)
    np.testing.assert_array_equal(ours[:, prefix:], expected)
    if prefix:
        np.testing.assert_array_equal(ours[:, :1], weights["prefix"])


@torch.no_grad()
@every("relative")
def test_relative_attention(fields):
    model = tiny(**fields)
    attention, has_cls = model.vit.layers[1].attention, model.config.num_prefix_tokens
    weights = double(attention)
    table = weights["positions.table"][0]
    assert table.shape == (3 * has_cls + 2 * ROWS * COLUMNS - 1, 7)  # one for all heads
    place = np.arange(has_cls + ROWS * COLUMNS)
    rows = 3 * has_cls + ROWS * COLUMNS - 1 + place[:, None] - place  # of the table, for each query and key
    if has_cls:
        rows[:, 0], rows[0], rows[0, 0] = 1, 0, 2
    tokens = torch.randn(2, len(place), 14)
    ours, _ = attention(tokens, grid=GRID)
    for image in range(2):
        expected = attend(weights, tokens[image].double().numpy(), table[rows])
        np.testing.assert_allclose(ours[image], expected, atol=2e-6)
    np.testing.assert_allclose(attention(tokens, num_queries=1, grid=GRID)[0], ours[:, :1], atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("layer", [0, 1])
def test_axial_attention(layer):
    attention = tiny(**VARIANTS["axial"]).vit.layers[layer].attention
    tokens = torch.randn(2, ROWS * COLUMNS, 14)
    ours, none = attention(tokens, grid=GRID)
    assert none is None
    weights, inputs = double(attention), tokens.double().numpy().reshape(2, ROWS, COLUMNS, 14)
    lines = inputs if layer == 0 else inputs.swapaxes(1, 2)
    expected = np.array([[attend(weights, line) for line in image] for image in lines])
    expected = expected if layer == 0 else expected.swapaxes(1, 2)
    np.testing.assert_allclose(ours, expected.reshape(2, -1, 14), atol=2e-6)
    _, attentions = attention(tokens, grid=GRID, output_attentions=True)
    assert attentions.shape == (2, 2, 30, 30)
    row, column = np.divmod(np.arange(30), COLUMNS)
    same = row[:, None] == row if layer == 0 else column[:, None] == column
    assert not attentions[:, :, ~torch.from_numpy(same)].any()
    values = attention.v_proj(tokens).unflatten(2, (2, 7)).transpose(1, 2)
    looked = attention.o_proj((attentions @ values).transpose(1, 2).flatten(2))
    torch.testing.assert_close(looked, ours, rtol=0, atol=2e-6)


@torch.no_grad()
@every("layer shared")
def test_positions_are_added_to_the_input_of_every_layer_and_nowhere_else(fields):
    model = tiny(**fields)
    inputs, outputs = [], []
    for layer in model.vit.layers:
        layer.layernorm_before.register_forward_hook(lambda module, args, output: inputs.append(args[0]))
        layer.register_forward_hook(lambda module, args, output: outputs.append(output))
    model(images(model), output_hidden_states=True)
    tokens = model.vit.embeddings.add_positions(model.vit.embeddings.embed_patches(images(model)), None)
    tables = model.vit.layer_position_embeddings(GRID)
    assert len(tables) == (1 if "shared" in fields["position_embedding_placement"] else 3)
    for index, before in enumerate([tokens, *outputs[:-1]]):
        torch.testing.assert_close(inputs[index], before + tables[index % len(tables)])


def relative_in_loops(table: np.ndarray, old: tuple[int, int], new: tuple[int, int]) -> np.ndarray:
    """(2 * old patches - 1, dim) -> (2 * new patches - 1, dim): the mean over all pairs of patches of that distance of
    what the table says, bilinearly, between the distances in rows and columns of the old grid."""
    total, pairs = np.zeros((2 * new[0] * new[1] - 1, table.shape[1])), np.zeros(2 * new[0] * new[1] - 1)
    scale = [(o - 1) / max(n - 1, 1) for o, n in zip(old, new, strict=True)]
    for p in np.ndindex(*new):
        for q in np.ndindex(*new):
            row, column = (p[0] - q[0]) * scale[0], (p[1] - q[1]) * scale[1]
            value = np.zeros(table.shape[1])
            for r in range(1 - old[0], old[0]):
                for c in range(1 - old[1], old[1]):
                    weight = max(1 - abs(row - r), 0) * max(1 - abs(column - c), 0)
                    value += weight * table[r * old[1] + c + old[0] * old[1] - 1]
            place = (p[0] * new[1] + p[1]) - (q[0] * new[1] + q[1]) + new[0] * new[1] - 1
            total[place] += value
            pairs[place] += 1
    return total / pairs[:, None]


@pytest.mark.parametrize(("old", "new"), [((3, 4), (5, 2)), ((2, 3), (3, 4)), ((4, 3), (1, 2))])
def test_relative_embeddings_on_another_grid(old, new):
    table = np.random.default_rng(0).standard_normal((3 + 2 * old[0] * old[1] - 1, 2))
    ours = resize_relative_embeddings(torch.from_numpy(table[None]), old, new, num_special=3)[0].numpy()
    np.testing.assert_array_equal(ours[:3], table[:3])
    np.testing.assert_allclose(ours[3:], relative_in_loops(table[3:], old, new), atol=1e-12)


@torch.no_grad()
@every("D relative axial")
def test_another_resolution_at_load_and_at_run_time(fields, tmp_path):
    model = tiny(**fields)
    model.save_pretrained(tmp_path)
    resized = HfViTForImageClassification.from_pretrained(tmp_path, image_size=(12, 54))
    pixel_values = torch.randn(2, 3, 12, 54)
    torch.testing.assert_close(resized(pixel_values).logits, model(pixel_values).logits, rtol=0, atol=1e-5)
    assert not torch.allclose(model(pixel_values).logits[0], model(pixel_values.flip(3)).logits[0], atol=1e-3)
    resized.save_pretrained(tmp_path)
    again = HfViTForImageClassification.from_pretrained(tmp_path)
    assert torch.equal(again(pixel_values).logits, resized(pixel_values).logits)


@torch.no_grad()
@every("D relative axial")
def test_the_backbone_and_masked_patch_prediction_support_the_variants(fields, tmp_path):
    model = tiny(**fields)
    model.save_pretrained(tmp_path)
    last = f"stage{model.config.num_hidden_layers}"
    backbone = HfViTBackbone.from_pretrained(tmp_path, out_features=[last])
    encoded = model.vit(images(model)).last_hidden_state[:, model.config.num_prefix_tokens :]
    maps = backbone(images(model)).feature_maps[0]
    torch.testing.assert_close(maps.flatten(2).transpose(1, 2), encoded)
    masked = HfViTForMaskedPatchPrediction(model.config)
    masked.vit.load_state_dict(model.vit.state_dict(), strict=False)
    seen = []
    masked.vit.layernorm.register_forward_hook(lambda module, args, output: seen.append(output))
    masked.eval()(images(model), bool_masked_pos=torch.zeros(2, ROWS * COLUMNS))
    torch.testing.assert_close(seen[0][:, model.config.num_prefix_tokens :], encoded)


@every("2-D layer shared relative")
def test_initialization_of_the_tables(fields):
    torch.manual_seed(0)
    config = tiny(**fields).config
    config.image_size, config.initializer_range = (400, 360), 0.05
    fresh = HfViTForImageClassification(config)
    tables = [value for name, value in fresh.named_parameters() if name.endswith((".table", ".x", ".y", ".prefix"))]
    assert tables
    for table in tables:
        assert table.std().item() == pytest.approx(0.05, rel=0.4 if table.numel() < 100 else 0.1)


def test_unsupported_combinations_are_refused():
    model = tiny(**VARIANTS["relative"], hidden_size=16)
    model.set_attn_implementation("flex_attention")
    with pytest.raises(ValueError, match="flex_attention"):
        model(images(model))
    mask = torch.arange(60).reshape(2, 30) < 55
    with pytest.raises(ValueError, match="attention_mask"):
        tiny(**VARIANTS["axial"])(images(model), attention_mask=mask)
    for variant in ("axial", "relative", "1-D shared"):
        with pytest.raises(ValueError, match="axial"):
            tiny(**VARIANTS[variant])(torch.zeros(1, 4, 72), spatial_shapes=torch.tensor([[2, 2]]))


@every("2-D layer shared relative axial")
def test_exports_refuse_the_variants_that_their_formats_lack(fields, tmp_path):
    model = tiny(**{**fields, "image_size": 24, "patch_size": 4})
    for to, dialect in (("jax", None), ("jax", "big_vision"), ("timm", None), ("transformers", None)):
        with pytest.raises(ConversionError, match=UNSUPPORTED):
            export(model, tmp_path / "exported", to, dialect=dialect)
    assert not list(tmp_path.iterdir())
