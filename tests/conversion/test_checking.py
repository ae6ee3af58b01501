"""`hf-vit convert --check`: the report equals the model of `convert`; files of known sizes judge assumptions."""

import json
import re
import shutil

import numpy as np
import pytest
from transformers import ViTConfig, ViTForImageClassification

from hf_vit.conversion import ConversionError, convert, export
from hf_vit.loading import load

from ..comparing import assert_same_weights, read_arrays
from ..paths import GOLDENS, MORE, PEERS
from ..tiny_models import SAME_PADDING, SIZES, their_bit, tiny

SQUARE, PRESET = "image_size", "preset"
TIMM, GRID = {"num_attention_heads": 2}, {"position_grid": (5, 9)}
# A file, options, and the fields that are assumed.
CASES = {
    "class token": (GOLDENS / "vit_token.npz", {}, [SQUARE, PRESET]),
    "stated": (
        GOLDENS / "vit_token.npz",
        {"position_grid": (2, 8), "preset": "augreg", "labels": [f"kind {index}" for index in range(10)]},
        [],
    ),
    "another image size": (GOLDENS / "vit_token.npz", {"image_size": 48}, ["position_grid", PRESET]),
    "another patch size": (GOLDENS / "vit_token.npz", {"patch_size": 6}, ["position_grid", PRESET]),
    "no positions": (GOLDENS / "bv_sincos.npz", {}, ["position_embedding_type", SQUARE, PRESET]),
    "no positions at a size": (GOLDENS / "bv_sincos.npz", {"image_size": 40}, ["position_embedding_type", PRESET]),
    "hybrid": (GOLDENS / "hybrid_r349.npz", {}, [SQUARE, PRESET]),
    "BiT": (GOLDENS / "bit_v1.npz", {}, [SQUARE, PRESET]),
    "timm": (PEERS / "timm_plain.safetensors", {**TIMM, **GRID}, ["hidden_act", "layer_norm_eps", PRESET]),
    "timm folder": (PEERS / "timm_folder", GRID, [PRESET]),
    "DeiT": (PEERS / "deit.pth", {**TIMM, **GRID}, ["hidden_act", "layer_norm_eps", PRESET]),
    "timm BiT": (PEERS / "timm_bit.safetensors", {}, [SQUARE, PRESET]),
    "torchvision": (PEERS / "torchvision.pth", TIMM, [SQUARE, PRESET]),
    "Flax folder": (MORE / "flax_folder", {}, []),
    "flexible": (MORE / "flexi_32_7.npz", {"patch_size": 16}, [SQUARE, "position_grid", PRESET]),
    "tower": (MORE / "siglip2.npz", {}, [SQUARE, PRESET]),
    "NaFlex": (MORE / "siglip2_naflex.npz", {}, []),
}


def rows_of(report: str) -> dict[str, tuple[str, str]]:
    """Parse a report: field -> (value, reason)."""
    lines = [re.split(r" {2,}", line.strip(), maxsplit=2) for line in report.splitlines() if line.startswith("  ")]
    return {name: (value, reason) for name, value, reason in lines}


def as_shown(value) -> str:
    return "none" if value is None else " x ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def listing(folder):
    return sorted((path, path.stat().st_mtime_ns) for path in folder.rglob("*"))


def assumed_in(model) -> list[str]:
    return [sentence.split()[0] for sentence in model.conversion_record["assumed"]]


@pytest.mark.parametrize("case", CASES)
def test_a_check_reports_the_converted_model_and_the_assumptions(case):
    source, options, assumed = CASES[case]
    rows = rows_of(convert(source, read_weights=False, **options).report())
    model, processor = convert(source, **options)
    fields = {name: value for name, (value, _) in rows.items() if name not in ("labels", "preset", "position_grid")}
    assert len(fields) > 5
    assert fields == {name: as_shown(getattr(model.config, name)) for name in fields}
    assert rows["preset"][0] == processor.preset
    assert (rows.get("labels", ("",))[0] == "10") == (case in ("stated", "Flax folder"))
    assert sorted(assumed_in(model)) == sorted(assumed)
    for sentence in model.conversion_record["assumed"]:
        name, value, reason = re.fullmatch(r"(\w+) (.*?): (.*)", sentence).groups()
        assert rows[name][0] == value
        assert reason in rows[name][1]


@pytest.mark.parametrize("has_preprocessor", [True, False])
def test_a_folder_of_transformers(tmp_path, has_preprocessor):
    ViTForImageClassification(ViTConfig(**SIZES, image_size=24, patch_size=4, num_labels=5)).save_pretrained(tmp_path)
    if has_preprocessor:
        (tmp_path / "preprocessor_config.json").write_text(json.dumps({"image_mean": [0.1, 0.2, 0.3]}))
    rows = rows_of(convert(tmp_path, read_weights=False).report())
    assert (rows["image_size"][0], rows["layer_norm_eps"][0]) == ("24", "1e-12")
    assert assumed_in(convert(tmp_path)[0]) == ([] if has_preprocessor else ["preset"])


def test_the_grid_of_a_released_file_is_known_from_its_name(tmp_path):
    """gs://vit_models/imagenet21k/ViT-H_14.npz is for 224 pixels: table 5 of the paper."""
    square = tiny(image_size=224, patch_size=32, num_labels=5)
    for name in ("ViT-H_14", "mine", "R50_L_32-i21k-300ep-lr_0.001-aug_medium1-wd_0.1-do_0.1-sd_0.1--imagenet2012-"
                 "steps_20k-lr_0.01-res_384"):  # fmt: skip
        export(square, tmp_path / f"{name}.npz", "jax")
        model, _ = convert(tmp_path / f"{name}.npz")
        assert model.config.image_size == 224
        assert ("image_size" in assumed_in(model)) == (name != "ViT-H_14")


def test_a_conversion_unpacks_and_saves_the_same_from_memory_and_streamed(tmp_path):
    source = GOLDENS / "vit_token.npz"
    complete = convert(source)
    model, processor = complete
    assert model is complete.model is complete[0]
    assert processor is complete.processor
    assert model.conversion_record is complete.record
    recognized = convert(source, read_weights=False)
    assert recognized.model.device.type == "meta"
    assert "sha256" not in recognized.record
    assert recognized.report() == complete.report()
    complete.save(tmp_path / "memory")
    assert recognized.save(tmp_path / "streamed").record == complete.record
    recognized.save(tmp_path / "theirs", save_for="transformers")
    for name in ("memory", "streamed", "theirs"):
        loaded, _ = load(tmp_path / name)
        assert_same_weights(loaded, model)
    with pytest.raises(FileExistsError):
        complete.save(tmp_path / "memory")
    with pytest.raises(ValueError, match="onnx"):
        complete.save(tmp_path / "other", save_for="onnx")


def test_the_heads_of_a_published_width_are_assumed_unless_they_are_stated(tmp_path):
    export(
        tiny(hidden_size=192, num_attention_heads=4, image_size=24, patch_size=4), tmp_path / "in.safetensors", "timm"
    )
    value, reason = rows_of(convert(tmp_path / "in.safetensors", read_weights=False).report())["num_attention_heads"]
    assert value == "3"
    assert "192" in reason
    rows = rows_of(
        convert(
            tmp_path / "in.safetensors", num_attention_heads=4, hidden_act="gelu_pytorch_tanh", read_weights=False
        ).report()
    )
    assert (rows["num_attention_heads"][0], rows["hidden_act"][0]) == ("4", "gelu_pytorch_tanh")


def test_the_image_size_of_a_bit_of_transformers_is_in_no_config(tmp_path):
    their_bit(layer_type="bottleneck", **SAME_PADDING).save_pretrained(tmp_path)
    assert "image_size" in assumed_in(convert(tmp_path)[0])
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"size": {"height": 43, "width": 64}}))
    assert rows_of(convert(tmp_path, read_weights=False).report())["image_size"][0] == "43 x 64"
    model, _ = convert(tmp_path)
    assert model.config.image_size == (43, 64)
    assert "image_size" not in assumed_in(model)


def test_the_command_writes_nothing_and_convert_reports_assumptions(tmp_path, run_command):
    shutil.copy(MORE / "siglip2.npz", tmp_path / "in.npz")
    before = listing(tmp_path)
    report = run_command(["convert", "--check", tmp_path / "in.npz"])
    assert listing(tmp_path) == before
    for name in ("in.npz", "big_vision", "params/img/", "HfViTModel", "txt"):
        assert name in report
    printed = run_command(["convert", tmp_path / "in.npz", tmp_path / "folder"])
    assumed = json.loads((tmp_path / "folder" / "conversion.json").read_text())["assumed"]
    assert len(assumed) == 2
    assert all(sentence in printed for sentence in assumed)


def test_a_check_reads_only_the_arrays_it_needs(tmp_path):
    """A check succeeds with arrays that are not finite, because it does not read them."""
    changed = read_arrays(GOLDENS / "vit_token.npz")
    changed |= {name: np.zeros_like(changed[name]) for name in ("head/kernel", "head/bias")}
    changed["Transformer/encoder_norm/bias"] = np.full_like(changed["Transformer/encoder_norm/bias"], np.nan)
    np.savez(tmp_path / "in.npz", **changed)
    with pytest.raises(ConversionError, match="encoder_norm"):
        convert(tmp_path / "in.npz")
    report = convert(tmp_path / "in.npz", read_weights=False).report()
    assert "HfViTModel" in report
    assert rows_of(report)["labels"][0] == "none"


def test_the_grid_of_naflex_is_in_the_file(tmp_path):
    arrays = read_arrays(MORE / "siglip2_naflex.npz")
    positions = arrays["params/img/pos_embedding"]
    np.savez(tmp_path / "in.npz", **arrays | {"params/img/pos_embedding": positions.reshape(2, 8, -1)})
    assert convert(tmp_path / "in.npz")[0].config.image_size == (8, 32)
    assert rows_of(convert(tmp_path / "in.npz", read_weights=False).report())["image_size"][0] == "8 x 32"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--check", MORE / "flexi_32_7.npz"], "FlexiViT"),
        (["--check", MORE / "BiT-M-R50x1.h5"], "BiT-M-R50x1.h5"),  # of Keras
        (["--check", MORE / "siglip.npz", "--position-grid", "3x5"], "16"),
        ([GOLDENS / "vit_token.npz"], "--check"),  # or a folder
    ],
)
def test_an_impossible_conversion_gives_one_sentence_and_status_2(run_command, arguments, sentence):
    assert sentence in run_command(["convert", *arguments], status=2)
