"""Every stage of every golden run, compared with the outputs of the original JAX code."""

import numpy as np
import pytest
import torch

from hf_vit.conversion import convert

from ..comparing import relative_gap
from ..paths import golden_runs

POOLING = {"token": "cls", "tok": "cls", "0": "cls", "token_unpooled": "none", "unpooled": "none", "none": "none"}
POOLING |= {"gap": "mean", "map": "map"}
RUNS = {run["id"]: run for run in golden_runs("vit")}
# Sizes that the patches do not divide: the original drops the rest, we refuse.
DROPPED = ["vit_token@39x33", "hybrid_stem@65x65", "hybrid_stem@66x67", "hybrid_stem@63x68", "hybrid_r11_linen"]
DROPPED += ["hybrid_stem@resize97"]


def has_resnet(run: dict) -> bool:
    return bool(run["resnet"] and run["resnet"]["num_layers"])


def load(run: dict, goldens, dtype: torch.dtype):
    model, _ = convert(
        goldens / run["checkpoint"],
        position_grid=None if run["positions_resized"] or run["posemb"] == "sincos2d" else tuple(run["token_grid"]),
        pooling=POOLING[run["classifier"]],
        position_interpolation="jax_exact",
    )
    if run["positions_resized"]:
        pixels = [size * model.config.stride for size in run["patch_size"]]
        model.set_image_size(tuple(np.multiply(run["token_grid"], pixels).tolist()))
    return model.to(dtype)


def record_stages(model) -> dict[str, torch.Tensor]:
    """Return a dictionary that a forward fills with every stage of the goldens, channels last."""
    stages: dict[str, torch.Tensor] = {}

    def record(register, name):
        def hook(module, inputs, output=None):  # a hook before the forward has no output
            stage = inputs[0] if output is None else output
            stages[name] = stage.permute(0, 2, 3, 1) if stage.ndim == 4 else stage

        register(hook)

    encoder = model.base_model
    stem = encoder.embeddings.stem
    if stem is not None:
        record(stem.stages.register_forward_pre_hook, "stem")
        for s, stage in enumerate(stem.stages, 1):
            for u, unit in enumerate(stage.layers, 1):
                record(unit.register_forward_hook, f"block{s}/unit{u}")
    record(encoder.embeddings.patch_embeddings.projection.register_forward_hook, "embedding")
    record(encoder.layers[0].register_forward_pre_hook, "embedded")
    for index, layer in enumerate(encoder.layers):
        record(layer.register_forward_hook, f"block_{index:02d}")
    record(encoder.layernorm.register_forward_hook, "encoded")
    encoder.layernorm.register_forward_hook(
        lambda module, inputs, output: stages.update(pooled=encoder.pooler.pool(output, None))
    )
    record(encoder.pooler.register_forward_hook, "pre_logits")
    if encoder is not model:
        record(model.classifier.register_forward_hook, "logits")
    return stages


def forward(model, run: dict, pixel_values: torch.Tensor) -> None:
    """Call the model; for a size that it refuses, do the same with the remainder of the map cut off."""
    if run["id"] not in DROPPED:
        model(pixel_values, output_hidden_states=True)  # without, the last layer computes only what the logits need
        return
    with pytest.raises(ValueError, match=r"\d+ .* \d+"):
        model(pixel_values)
    encoder, embeddings = model.base_model, model.base_model.embeddings
    feature_map = pixel_values if embeddings.stem is None else embeddings.stem(pixel_values)
    rows, columns = np.multiply(run["token_grid"], run["patch_size"])
    hidden_states = embeddings.patch_embeddings(feature_map[:, :, :rows, :columns])
    hidden_states = torch.cat([embeddings.cls_token.expand(len(hidden_states), -1, -1), hidden_states], dim=1)
    hidden_states = hidden_states + embeddings.position_embeddings_for(tuple(run["token_grid"]), hidden_states)
    for layer in encoder.layers:
        hidden_states = layer(hidden_states)
    model.classifier(encoder.pooler(encoder.layernorm(hidden_states)))


def difference(ours: torch.Tensor, expected: np.ndarray) -> float:
    """Return the largest difference, relative to the largest value if that is above 1."""
    assert tuple(ours.shape) == expected.shape
    return np.abs(ours.numpy() - expected).max() / max(1.0, np.abs(expected).max())


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize(
    ("dtype", "attention"), [(torch.float32, "eager"), (torch.float32, "sdpa"), (torch.float64, "sdpa")]
)
def test_every_stage_equals_the_goldens(run, goldens, dtype, attention):
    model = load(run, goldens, dtype)
    model.set_attn_implementation(attention)
    with np.load(goldens / run["expected"]) as expected, torch.no_grad():
        stages = record_stages(model)
        forward(model, run, torch.from_numpy(expected["images"]).to(dtype).permute(0, 3, 1, 2))
        if dtype == torch.float64:
            tolerance = 1e-6 if run["positions_resized"] else 1e-9
            names = [name for name in expected.files if name.endswith("_f64")]
            assert names
        else:
            tolerance = 1e-4 if has_resnet(run) else 1e-5
            names = [name for name in expected.files if name not in ("images", "pos_embedding") and "_f64" not in name]
        gaps = {name: difference(stages[name.removesuffix("_f64")], expected[name]) for name in names}
        assert max(gaps.values()) <= tolerance, gaps
        if "pos_embedding" in expected:
            positions = model.base_model.embeddings.position_embeddings
            assert difference(positions, expected["pos_embedding"]) <= 1e-6


NOT_DROPPED = {name: run for name, run in RUNS.items() if name not in DROPPED}


@pytest.mark.parametrize("run", NOT_DROPPED.values(), ids=NOT_DROPPED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_classification_path_equals_the_goldens(run, goldens, dtype):
    """Nothing but the logits, or the inputs of the head, is asked of the model.

    In bfloat16, rounded weights alone give 8e-2 of the largest logit for deep random stems.
    """
    model = load(run, goldens, dtype)
    with np.load(goldens / run["expected"]) as expected, torch.no_grad():
        pixel_values = torch.from_numpy(expected["images"]).permute(0, 3, 1, 2)
        if "logits" in expected:
            ours, wanted = model(pixel_values).logits, expected["logits"]
        else:
            ours, wanted = model(pixel_values, only_pooled=True).pooler_output, expected["pre_logits"]
    if dtype == torch.float32:
        assert difference(ours, wanted) <= (1e-4 if has_resnet(run) else 1e-5)
    else:
        assert relative_gap(ours.float(), wanted) < (0.4 if has_resnet(run) else 2e-2)


def test_every_golden_has_a_test(goldens):
    bit = golden_runs("bit", "bit_paper")
    assert len(RUNS) + len(bit) + len(golden_runs("mixer")) == 52
    assert {path.name for path in goldens.glob("*.expected.npz")} == {run["expected"] for run in (*RUNS.values(), *bit)}
