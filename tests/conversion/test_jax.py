"""Checkpoints of the original JAX code: reading, refusing, writing."""

import hashlib
import json

import numpy as np
import pytest
import torch

from hf_vit.conversion import ConversionError, convert, export
from hf_vit.loading import save_folder

from ..comparing import assert_same_file, assert_same_weights, read_arrays
from ..paths import golden_runs
from ..tiny_models import load_model

CHECKPOINTS = {run["checkpoint"]: run for run in golden_runs("vit") if "@" not in run["id"]}


def changed(goldens, tmp_path, **changes):
    """Copy a golden checkpoint with other arrays, or without one (None), under a meaningless name."""
    arrays = read_arrays(goldens / "vit_token_rep.npz") | changes
    np.savez(tmp_path / "changed.npz", **{name: array for name, array in arrays.items() if array is not None})
    return tmp_path / "changed.npz"


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_everything_is_inferred_under_any_name(goldens, tmp_path, checkpoint):
    run = CHECKPOINTS[checkpoint]
    (tmp_path / "L_32-anything.npz").write_bytes((goldens / checkpoint).read_bytes())
    grid = tuple(run["token_grid"]) if run["posemb"] == "learn" else None
    model, processor = convert(tmp_path / "L_32-anything.npz", position_grid=grid)
    config = model.config
    assert (config.hidden_size, config.num_hidden_layers) == (run["hidden_size"], run["num_layers"])
    assert (config.num_attention_heads, config.intermediate_size) == (run["num_heads"], run["mlp_dim"])
    assert config.representation_size == run["representation_size"]
    assert config.pooling == {"token": "cls", "tok": "cls", "gap": "mean", "map": "map"}[run["classifier"]]
    assert config.position_embedding_type == {"learn": "learned", "sincos2d": "sincos2d"}[run["posemb"]]
    assert (model.base_model is not model) == bool(run["num_classes"])
    if run["num_classes"]:
        assert config.num_labels == run["num_classes"]
    if run["resnet"]:
        assert list(config.stem_depths) == run["resnet"]["num_layers"]
        assert config.stem_width == 64 * run["resnet"]["width_factor"]
    if grid:
        assert config.grid_size == grid
    assert processor(np.zeros((5, 7, 3), np.uint8)).pixel_values[0].shape[1:] == tuple(
        np.broadcast_to(config.image_size, 2)
    )


def test_the_record_describes_the_file(goldens, tmp_path):
    model, processor = convert(goldens / "bv_scan_params.npz")
    save_folder(tmp_path / "out", model, processor)
    record = json.loads((tmp_path / "out" / "conversion.json").read_text())
    assert record["dialect"] == {"names": "big_vision", "prefix": "params/", "stacked": True}
    assert (record["dtypes"], record["other_parts"]) == (["bfloat16"], ["opt"])
    assert record["sha256"] == hashlib.sha256((goldens / "bv_scan_params.npz").read_bytes()).hexdigest()


def test_a_vit_jax_file_with_big_visions_names_gives_the_same_logits(goldens, tmp_path):
    model, _ = convert(goldens / "vit_token.npz")
    export(model, tmp_path / "folded.npz", "jax", dialect="big_vision")
    folded, _ = convert(tmp_path / "folded.npz")
    assert folded.config.no_embed_class
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(folded(images).logits, model(images).logits, rtol=0, atol=1e-6)


def test_bfloat16_models_are_written_as_two_byte_voids(goldens, tmp_path):
    model, _ = convert(goldens / "vit_gap.npz")
    export(model.bfloat16(), tmp_path / "half.npz", "jax")
    assert {str(array.dtype) for array in read_arrays(tmp_path / "half.npz").values()} == {"|V2"}
    again, _ = convert(tmp_path / "half.npz")
    assert_same_weights(again, model.float())


@pytest.mark.parametrize("bias", [0.0, -10.0])
def test_an_all_zero_head_is_dropped_recorded_and_restored(goldens, tmp_path, bias):
    head = {"head/kernel": np.zeros((24, 21843), np.float32), "head/bias": np.full(21843, bias, np.float32)}
    source = changed(goldens, tmp_path, **head)
    model, processor = convert(source)
    assert model.conversion_record["dropped"] == {"head": {"shape": [24, 21843], "bias": bias}}
    save_folder(tmp_path / "folder", model, processor)
    export(load_model(tmp_path / "folder"), tmp_path / "back.npz", "jax")
    assert_same_file(tmp_path / "back.npz", source)


def test_older_dialects(goldens, tmp_path):
    """Positions in the encoder, and a MAP head inlined at the top level (big_vision's fix_old_checkpoints)."""
    arrays = read_arrays(goldens / "bv_map.npz")
    old = {name.removeprefix("MAPHead_0/"): array for name, array in arrays.items()}
    old["Transformer/pos_embedding"] = old.pop("pos_embedding")
    np.savez(tmp_path / "old.npz", **old)
    model, _ = convert(goldens / "bv_map.npz")
    again, _ = convert(tmp_path / "old.npz")
    assert_same_weights(again, model)


def test_labels(goldens, tmp_path):
    names = [f"species {index}" for index in range(10)]
    (tmp_path / "names.txt").write_text("\n".join(names) + "\n")
    (tmp_path / "names.json").write_text(json.dumps(dict(enumerate(names))))
    for labels in (names, tmp_path / "names.txt", tmp_path / "names.json"):
        model, _ = convert(goldens / "vit_token.npz", labels=labels)
        assert list(model.config.id2label.values()) == names
        assert model.config.label2id["species 7"] == 7
    wrong = [("vit_token", "imagenet1k", "1000"), ("vit_token", "imagenet22k", "22k"), ("vit_nohead", names, "head")]
    for checkpoint, labels, message in wrong:
        with pytest.raises(ConversionError, match=message):
            convert(goldens / f"{checkpoint}.npz", labels=labels)


NAN = np.where(np.arange(240).reshape(24, 10) // 3 == 11, np.float32("nan"), np.float32(1))  # three of them
QUERY = "Transformer/encoderblock_1/MultiHeadDotProductAttention_1/query/bias"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({QUERY: None}, "encoderblock_1.*query/bias"),
        ({"embedding/kernel": None}, "changed.npz"),
        ({"Transformer/encoderblock_0/MlpBlock_3/Dense_0/kernel": None}, "MlpBlock_3/Dense_0"),
        ({"extra/a": np.ones(2), "extra/b": np.ones(3)}, "extra/a, extra/b"),
        ({QUERY: np.ones((3, 15), np.float32)}, r"\(3, 15\).*\(48,\)"),
        ({"head/kernel": NAN}, "head/kernel has 3"),
        ({"cls": np.full((1, 1, 48), np.inf, np.float32)}, "cls has 48"),
        ({"cls": np.ones((1, 1, 48), np.int32)}, "int32"),
        ({"embedding/kernel": np.ones((8, 8, 48))}, "changed.npz"),
        ({"Transformer/posembed_input/pos_embedding": np.ones((1, 16, 48))}, "15"),
    ],
)
def test_wrong_arrays_are_listed(goldens, tmp_path, changes, message):
    with pytest.raises(ConversionError, match=message):
        convert(changed(goldens, tmp_path, **changes))


def test_other_arrays_are_named(tmp_path):
    np.savez(tmp_path / "other.npz", a=np.ones(2), b=np.ones(2))
    with pytest.raises(ConversionError, match="a, b"):
        convert(tmp_path / "other.npz")


def test_settings_that_no_array_fits_are_refused(goldens):
    with pytest.raises(ConversionError, match="position_embeddings"):
        convert(goldens / "vit_token.npz", position_embedding_type="learned2d")
    with pytest.raises(ConversionError, match="position_grid"):
        convert(goldens / "vit_token.npz", position_grid=(3, 5))


@pytest.mark.parametrize(
    ("checkpoint", "dialect", "message"),
    [
        ("bv_map.npz", "vit_jax", "pooling='map'"),
        ("bv_sincos.npz", "vit_jax", "sincos2d"),
        ("hybrid_stem.npz", "big_vision", "hf_vit_hybrid"),
        ("vit_token.npz", "t5x", "vit_jax"),
    ],
)
def test_models_that_a_dialect_does_not_support(goldens, tmp_path, checkpoint, dialect, message):
    model, _ = convert(goldens / checkpoint)
    with pytest.raises(ConversionError, match=message):
        export(model, tmp_path / "out.npz", "jax", dialect=dialect)
    assert not list(tmp_path.iterdir())


def test_folders(goldens, tmp_path):
    with pytest.raises((ConversionError, OSError), match=tmp_path.name):
        convert(tmp_path)
    (tmp_path / "one.npz").write_bytes((goldens / "vit_gap.npz").read_bytes())
    assert convert(tmp_path)[0].config.pooling == "mean"
    (tmp_path / "two.npz").write_bytes((goldens / "vit_gap.npz").read_bytes())
    with pytest.raises(ConversionError, match=r"one.npz"):
        convert(tmp_path)


@pytest.mark.parametrize(
    "checkpoint", ["hybrid_stem_rep_gap.npz", "bv_scan_params.npz", "bv_tok.npz", "vit_nohead.npz"]
)
def test_streaming_to_a_folder_equals_saving(goldens, tmp_path, checkpoint):
    save_folder(tmp_path / "through", *convert(goldens / checkpoint))
    model = convert(goldens / checkpoint, read_weights=False).save(tmp_path / "straight").model
    assert model.device.type == "meta"
    files = {path.name for path in (tmp_path / "straight").glob("[!.]*")}
    new = {"README.md", "manifest.json"}
    assert files == {path.name for path in (tmp_path / "through").glob("[!.]*")} | new
    for name in files - {"model.safetensors", *new}:
        assert (tmp_path / "straight" / name).read_text() == (tmp_path / "through" / name).read_text(), name
    straight, through = load_model(tmp_path / "straight"), load_model(tmp_path / "through")
    assert_same_weights(straight, through)
