"""`hf-vit convert --check`: the report equals the model of `convert`; files of known sizes judge assumptions."""

import json
import re

import numpy as np
import pytest
from transformers import BitConfig, BitForImageClassification, ViTConfig, ViTForImageClassification

from hf_vit.cli import main
from hf_vit.conversion import ConversionError, check, convert, export_jax, export_timm

from ..paths import GOLDENS, MORE, PEERS
from ..tiny_models import SIZES, tiny

SQUARE, PRESET = "image_size", "preset"
TIMM = {"num_attention_heads": 2}
# A file, options, fields with a part of their reasons, and the fields that are assumed.
CASES = {
    "class token": (
        GOLDENS / "vit_token.npz",
        {},
        {
            "patch_size": (8, "8 x 8 x 3 x 32"),
            "num_attention_heads": (4, "32 x 4 x 8"),
            "pooling": ("cls", "cls"),
            "image_size": (32, "4 x 4 patches of 8 x 8"),
            "labels": ("none", ""),
        },
        [SQUARE, PRESET],
    ),
    "stated": (
        GOLDENS / "vit_token.npz",
        {"position_grid": (2, 8), "preset": "augreg", "labels": [f"kind {index}" for index in range(10)]},
        {
            "image_size": ("16 x 64", "2 x 8 patches of 8 x 8"),
            "preset": ("augreg", "stated"),
            "labels": (10, "kind 0, kind 1"),
        },
        [],
    ),
    "another image size": (
        GOLDENS / "vit_token.npz",
        {"image_size": 48},
        {"image_size": (48, "stated"), "position_grid": ("square", "16 positions")},
        ["position_grid", PRESET],
    ),
    "another patch size": (
        GOLDENS / "vit_token.npz",
        {"patch_size": 6},
        {"patch_size": (6, "stated"), "image_size": (24, "patch size")},
        ["position_grid", PRESET],
    ),
    "mean": (GOLDENS / "bv_gap.npz", {}, {"pooling": ("mean", "cls")}, [SQUARE, PRESET]),
    "no positions": (
        GOLDENS / "bv_sincos.npz",
        {},
        {"image_size": (224, "28 x 28 patches of 8 x 8")},
        ["position_embedding_type", "image_size", PRESET],
    ),
    "no positions at a size": (GOLDENS / "bv_sincos.npz", {"image_size": 40}, {}, ["position_embedding_type", PRESET]),
    "hybrid": (
        GOLDENS / "hybrid_r349.npz",
        {},
        {"stem_depths": ("[3, 4, 9]", "3"), "num_channels": (3, "7 x 7 x 3 x 32")},
        [SQUARE, PRESET],
    ),
    "BiT": (GOLDENS / "bit_v1.npz", {}, {"embedding_size": (32, "")}, ["image_size", PRESET]),
    "timm": (
        PEERS / "timm_plain.safetensors",
        {**TIMM, "position_grid": (5, 9)},
        {"num_attention_heads": (2, "stated")},
        ["hidden_act", "layer_norm_eps", PRESET],
    ),
    "timm folder": (
        PEERS / "timm_folder",
        {"position_grid": (5, 9)},
        {
            "num_attention_heads": (2, "config.json"),
            "hidden_act": ("gelu_pytorch_tanh", "config.json"),
        },
        ["layer_norm_eps"],
    ),
    "DeiT": (
        PEERS / "deit.pth",
        {**TIMM, "position_grid": (5, 9)},
        {"preset": ("timm", "DeiT")},
        ["hidden_act", "layer_norm_eps", PRESET],
    ),
    "timm BiT": (PEERS / "timm_bit.safetensors", {}, {}, ["image_size", PRESET]),
    "torchvision": (PEERS / "torchvision.pth", TIMM, {"representation_size": (17, "17 x 14")}, [SQUARE, PRESET]),
    "Flax folder": (MORE / "flax_folder", {}, {"hidden_act": ("gelu", "config.json"), "labels": (10, "kind 0")}, []),
    "flexible": (
        MORE / "flexi_32_7.npz",
        {"patch_size": 16},
        {"patch_size": (16, "stated"), "stored_patch_size": (32, "32 x 32 x 3 x 16"), "image_size": (240, "FlexiViT")},
        ["image_size", "position_grid", PRESET],
    ),
    "tower": (MORE / "siglip2.npz", {}, {"pooling": ("map", "MAP head")}, [SQUARE, PRESET]),
    "language model": (MORE / "paligemma.npz", {}, {"projection_dim": (40, "32 x 40")}, [SQUARE, PRESET]),
    "NaFlex": (MORE / "siglip2_naflex.npz", {}, {"preset": ("native", "NaFlex")}, []),
}


def rows_of(report: str) -> dict[str, tuple[str, str]]:
    """Parse a report: field -> (value, reason); an omitted reason is that of the line above."""
    rows, above = {}, ""
    for line in report.splitlines():
        if line.startswith("  "):
            name, value, *reason = re.split(r" {2,}", line.strip(), maxsplit=2)
            above = reason[0] if reason else above
            rows[name] = value, above
    return rows


def as_shown(value) -> str:
    return "none" if value is None else " x ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def listing(folder):
    return sorted((path, path.stat().st_mtime_ns) for path in folder.rglob("*"))


@pytest.mark.parametrize("case", CASES)
def test_a_check_reports_the_converted_model_and_the_assumptions(case):
    source, options, expected, assumed = CASES[case]
    rows = rows_of(check(source, **options))
    model, processor = convert(source, **options)
    for name, (value, reason) in expected.items():
        assert rows[name][0] == str(value)
        assert reason in rows[name][1]
    fields = {name: value for name, (value, _) in rows.items() if name not in ("labels", "preset", "position_grid")}
    assert len(fields) > 5
    assert fields == {name: as_shown(getattr(model.config, name)) for name in fields}
    assert rows["preset"][0] == processor.preset
    sentences = model.conversion_record["assumed"]
    assert sorted(sentence.split()[0] for sentence in sentences) == sorted(assumed)
    assert sorted(name for name, (_, reason) in rows.items() if reason.startswith("assumed: ")) == sorted(assumed)
    for sentence in sentences:
        name, value, reason = re.fullmatch(r"(\w+) (.*?): (.*)", sentence).groups()
        assert rows[name] == (value, f"assumed: {reason}")


@pytest.mark.parametrize("has_preprocessor", [True, False])
def test_a_folder_of_transformers(tmp_path, has_preprocessor):
    ViTForImageClassification(ViTConfig(**SIZES, image_size=24, patch_size=4, num_labels=5)).save_pretrained(tmp_path)
    if has_preprocessor:
        (tmp_path / "preprocessor_config.json").write_text(json.dumps({"image_mean": [0.1, 0.2, 0.3]}))
    before, rows = listing(tmp_path), rows_of(check(tmp_path))
    assert listing(tmp_path) == before
    assert (rows["image_size"], rows["layer_norm_eps"][0]) == (("24", "stated in config.json"), "1e-12")
    assumed = convert(tmp_path)[0].conversion_record["assumed"]
    assert [text.split(":")[0] for text in assumed] == ([] if has_preprocessor else ["preset transformers"])


def test_the_grid_of_a_released_file_is_known_from_its_name(tmp_path):
    """gs://vit_models/imagenet21k/ViT-H_14.npz is for 224 pixels: table 5 of the paper."""
    square = tiny(image_size=224, patch_size=32, num_labels=5)
    for name in ("ViT-H_14", "mine", "R50_L_32-i21k-300ep-lr_0.001-aug_medium1-wd_0.1-do_0.1-sd_0.1--imagenet2012-"
                 "steps_20k-lr_0.01-res_384"):  # fmt: skip
        export_jax(square, tmp_path / f"{name}.npz")
        value, reason = rows_of(check(tmp_path / f"{name}.npz"))["image_size"]
        assert value == "224"
        assert reason.startswith("assumed: ") == (name != "ViT-H_14")
        assert reason.endswith("the released file of this name has images of 224 pixels") == (name == "ViT-H_14")


def test_heads_of_64_channels_are_assumed_unless_they_are_stated(tmp_path):
    export_timm(tiny(hidden_size=128, num_attention_heads=4, image_size=24, patch_size=4), tmp_path / "in.safetensors")
    value, reason = rows_of(check(tmp_path / "in.safetensors"))["num_attention_heads"]
    assert (value, reason.split(":")[0], reason[-8:]) == ("2", "assumed", "128 / 64")
    rows = rows_of(check(tmp_path / "in.safetensors", num_attention_heads=4, hidden_act="gelu_pytorch_tanh"))
    assert rows["num_attention_heads"] == ("4", "stated")
    assert rows["hidden_act"] == ("gelu_pytorch_tanh", "stated")


def test_the_image_size_of_a_bit_of_transformers_is_in_no_config(tmp_path):
    sizes = {"embedding_size": 32, "hidden_sizes": [128, 256], "depths": [1, 2], "global_padding": "SAME"}
    config = BitConfig(**sizes, layer_type="bottleneck", embedding_dynamic_padding=True, num_labels=7)
    BitForImageClassification(config).save_pretrained(tmp_path)
    assert rows_of(check(tmp_path))["image_size"][1].startswith("assumed: no array of a ResNet shows it")
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"size": {"height": 43, "width": 64}}))
    assert rows_of(check(tmp_path))["image_size"] == ("43 x 64", "stated in preprocessor_config.json")
    assert convert(tmp_path)[0].config.image_size == (43, 64)


def test_the_command_writes_nothing_and_convert_reports_assumptions(tmp_path, monkeypatch, capsys):
    with np.load(MORE / "siglip2.npz") as arrays:
        np.savez(tmp_path / "in.npz", **arrays)
    monkeypatch.chdir(tmp_path)
    before = listing(tmp_path)
    assert main(["convert", "--check", "in.npz"]) == 0
    assert listing(tmp_path) == before
    report = capsys.readouterr().out
    assert "in.npz: names of big_vision, prefix params/img/, stacked, float32\nHfViTModel, " in report
    assert "b (similarity bias), t (similarity temperature), txt (text tower)" in report
    assert main(["convert", "in.npz", "folder"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("assumed: ")]
    written = json.loads((tmp_path / "folder" / "conversion.json").read_text())
    assert lines == [f"assumed: {sentence}" for sentence in written["assumed"]]
    assert len(lines) == 2


def test_a_check_reads_only_the_arrays_it_needs(tmp_path):
    """A check succeeds with arrays that are not finite, because it does not read them."""
    with np.load(GOLDENS / "vit_token.npz") as arrays:
        changed = dict(arrays)
    changed["head/kernel"] = np.zeros_like(changed["head/kernel"])
    changed["head/bias"] = np.zeros_like(changed["head/bias"])
    changed["Transformer/encoder_norm/bias"] = np.full_like(changed["Transformer/encoder_norm/bias"], np.nan)
    np.savez(tmp_path / "in.npz", **changed)
    with pytest.raises(ConversionError, match="encoder_norm"):
        convert(tmp_path / "in.npz")
    report = check(tmp_path / "in.npz")
    assert "all zero" in report
    assert rows_of(report)["labels"][0] == "none"


def test_the_grid_of_naflex_is_in_the_file(tmp_path):
    with np.load(MORE / "siglip2_naflex.npz") as arrays:
        changed = dict(arrays)
    positions = changed["params/img/pos_embedding"]
    np.savez(tmp_path / "in.npz", **changed | {"params/img/pos_embedding": positions.reshape(2, 8, -1)})
    assert convert(tmp_path / "in.npz")[0].config.image_size == (8, 32)
    assert rows_of(check(tmp_path / "in.npz"))["image_size"] == (
        "8 x 32",
        "16 positions: 2 x 8 patches of 4 x 4 pixels",
    )


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["flexi_32_7.npz"], "FlexiViT"),
        (["BiT-M-R50x1.h5"], "Keras"),
        (["siglip.npz", "--position-grid", "3x5"], "16"),
    ],
)
def test_an_impossible_conversion_gives_one_sentence_and_status_2(run_command, arguments, sentence):
    assert sentence in run_command(["convert", "--check", MORE / arguments[0], *arguments[1:]], status=2)


def test_convert_needs_a_folder_or_check(run_command):
    assert "--check" in run_command(["convert", GOLDENS / "vit_token.npz"], status=2)
