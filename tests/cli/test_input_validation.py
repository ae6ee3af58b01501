"""Values of a wrong type from any source: one sentence on standard error and exit status 2."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from hf_vit.cli import main
from hf_vit.conversion import convert

from ..paths import GOLDENS, PEERS, ROOT
from ..tiny_models import save_tiny

CONFIGURATIONS = [
    {"num_attention_heads": "x"},
    {"hidden_size": 10**9},
    {"image_size": [100000, 120000]},
    {"architectures": 3},
    {"id2label": 7},
    {"id2label": {"0": ["a"], "1": "b"}},
    {"id2label": None, "num_labels": 10**10},
    {"dtype": "load"},
    {"layer_norm_eps": float("nan")},
    "[" * 100000,
    "[1]",
]
PROCESSORS = [
    {"size": "x"},
    {"size": {"height": 10**6, "width": 10**5}},
    {"image_mean": ["a"]},
    {"preset": ["vit_jax"]},
    {"crop_pct": 1e-30, "preset": "timm"},
    {"preset": "native", "max_num_patches": 10**9},
    "[1]",
    "{",
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    Image.new("RGB", (40, 40)).save(folder / "picture.png")
    return save_tiny(folder / "model")


def refused(capfd, *arguments) -> str:
    """Run a command that must fail; return its message, which is one line."""
    assert main(list(map(str, arguments))) == 2
    message = capfd.readouterr().err
    assert message.count("\n") == 1
    return message


def changed(whole, tmp_path, file, change):
    """Return a copy of the folder in which a file has another text, or some other fields."""
    folder = shutil.copytree(whole, tmp_path / "folder")
    old = json.loads((folder / file).read_text()) if (folder / file).exists() and isinstance(change, dict) else {}
    (folder / file).write_text(change if isinstance(change, str) else json.dumps(old | change))
    return folder


SETTINGS = [*(("config.json", change) for change in CONFIGURATIONS)]
SETTINGS += [("preprocessor_config.json", change) for change in PROCESSORS]


@pytest.mark.parametrize(("file", "change"), SETTINGS, ids=lambda value: str(value)[:40])
def test_settings_of_wrong_values(whole, tmp_path, capfd, file, change):
    folder = changed(whole, tmp_path, file, change)
    assert str(tmp_path) in refused(capfd, "predict", folder, whole.parent / "picture.png")


CARD_FILES = [
    ("config.json", {"architectures": 3}),
    ("config.json", {"architectures": [["a"]]}),
    ("config.json", {"model_type": [1]}),
    ("config.json", "[1]"),
    ("card_data.json", {"dataset": ["a"]}),
    ("card_data.json", {"metrics": 3}),
    ("card_data.json", {"classes": [{"name": "a"}]}),
    ("conversion.json", {"source": 3}),
    ("conversion.json", {"versions": 3}),
    ("calibration.json", {"images": 3}),
    ("README.md", "---\ntags: [[1]]\n---\n"),
]


@pytest.mark.parametrize(("file", "change"), CARD_FILES, ids=lambda value: str(value)[:40])
def test_the_files_of_a_card_with_wrong_values(whole, tmp_path, capfd, file, change):
    assert file in refused(capfd, "card", changed(whole, tmp_path, file, change))


@pytest.mark.parametrize("text", ["{", "[1]"])
def test_a_damaged_config_json_is_named_before_a_push(whole, tmp_path, capfd, text):
    assert "config.json" in refused(capfd, "push", changed(whole, tmp_path, "config.json", text), "me/vit")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("num_attention_heads=x", "num_attention_heads"),
        ("pooling=[1]", "'cls'"),
        ("hidden_act=3", "hidden_act"),
        ("layer_norm_eps=NaN", "layer_norm_eps"),
    ],
)
def test_a_field_on_the_command_line_of_a_wrong_type(tmp_path, capfd, setting, message):
    source = GOLDENS / "vit_token.npz"
    assert message in refused(capfd, "convert", source, tmp_path / "out", "--set", setting)
    assert list(tmp_path.iterdir()) == []


ALIASES = "a: &a [x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 8)}]\n" for before, name in zip("abcdef", "bcdefg", strict=True)
)
RECIPES_OF_WRONG_VALUES = [
    ("base: recipe.yaml\n", "recipe.yaml"),
    ("base: other.yaml\n", "other.yaml"),  # whose base is this one
    ("base: [1]\n", r"\[1\]"),
    ("options: {a: {b: 3}}\n", "options.*'b'"),
    ("select: [a]\n", "select.*'a'"),
    ("1: 2\n", "recipe.yaml|1"),
    (ALIASES + "learning_rate: *g\n", "recipe.yaml"),
    ("[" * 5_000, "recipe.yaml"),
    ("- a\n- b\n", "recipe.yaml"),
    ("batch_size: " + "9" * 5_000, "recipe.yaml"),
    ("flip: !!bool x\n", "'x'"),
    ("epochs: .inf\n", "epochs"),
    ("learning_rate: {a: b}\n", "learning_rate"),
    ("learning_rate: [" + "x, " * 90_000 + "]\n", "learning_rate"),
]


@pytest.mark.parametrize(("text", "message"), RECIPES_OF_WRONG_VALUES, ids=lambda value: value[:30])
def test_a_recipe_of_wrong_values(tmp_path, capfd, text, message):
    (tmp_path / "recipe.yaml").write_text(text)
    (tmp_path / "other.yaml").write_text("base: recipe.yaml\n")
    assert main(["pretrain", "--recipe", str(tmp_path / "recipe.yaml"), "--print_config"]) == 2
    said = capfd.readouterr().err
    assert re.search(message, said)
    assert said.count("\n") == 1
    assert len(said) < 2_000


NO_LABELS = [b'"abc"', b'["a", null, "c", "d", "e"]', rb'["a", "b\nc", "c", "d", "e"]']
NO_LABELS += [rb'["\ud800", "b", "c", "d", "e"]', b"[" * 100_000, b"\xff\xfea\x00"]


@pytest.mark.parametrize("content", NO_LABELS, ids=lambda content: str(content)[:30])
def test_labels_that_are_not_text(tmp_path, capfd, content):
    file = tmp_path / ("labels.txt" if content.startswith(b"\xff") else "labels.json")
    file.write_bytes(content)
    refused(capfd, "convert", GOLDENS / "vit_token.npz", tmp_path / "out", "--labels", file)
    assert not (tmp_path / "out").exists()


def test_labels_with_a_byte_order_mark(tmp_path):
    (tmp_path / "labels.txt").write_text("\n".join(f"Käse {number}" for number in range(10)), encoding="utf-8-sig")
    model, _ = convert(GOLDENS / "vit_token.npz", labels=tmp_path / "labels.txt")
    assert model.config.id2label[0] == "Käse 0"


def test_pth_with_a_flipped_bit(tmp_path, capfd):
    """The archive's checksum shows it, but torch.load does not look."""
    content = bytearray((PEERS / "deit.pth").read_bytes())
    weights = torch.load(PEERS / "deit.pth", weights_only=True)["model"]
    largest = max(weights.values(), key=torch.Tensor.numel)
    content[content.index(largest.numpy().tobytes()) + 101] ^= 1
    (tmp_path / "flipped.pth").write_bytes(content)
    torch.load(tmp_path / "flipped.pth", weights_only=True)
    assert "flipped.pth" in refused(capfd, "convert", tmp_path / "flipped.pth", tmp_path / "out")


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_weights_of_a_folder_that_are_damaged(whole, tmp_path, capfd, name):
    folder = shutil.copytree(whole, tmp_path / "folder")
    (folder / "model.safetensors").unlink()
    weights = whole / "model.safetensors" if name == "model.safetensors" else PEERS / "deit.pth"
    (folder / name).write_bytes(weights.read_bytes()[:-99])
    assert str(folder) in refused(capfd, "predict", folder, whole.parent / "picture.png")


@pytest.mark.parametrize("command", ["card {}", "compute {}", "convert {} out", "push {} me/vit"])
def test_an_adapter_is_named_as_one(command, tmp_path, capfd):
    (tmp_path / "adapter").mkdir()
    about = {"peft_type": "LORA", "base_model_name_or_path": "me/base"}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(about))
    save_file({"base_model.model.q_proj.lora_A.weight": torch.ones(1)}, tmp_path / "adapter/adapter_model.safetensors")
    assert "hf_vit.load" in refused(capfd, *command.format(tmp_path / "adapter").split())


def test_a_pth_without_checksums_is_read(tmp_path):
    contents = torch.load(PEERS / "deit.pth", weights_only=True)
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(contents, tmp_path / "without.pth")
    finally:
        torch.serialization.set_crc32_options(True)
    model, _ = convert(tmp_path / "without.pth", num_attention_heads=2, position_grid=(5, 9))
    assert model.config.num_attention_heads == 2


@pytest.mark.parametrize("name", ["finetune", "pretrain", "evaluate"])
def test_ctrl_c_while_a_training_script_imports(tmp_path, name):
    (tmp_path / "torch.py").write_text("raise KeyboardInterrupt")
    options = {
        "finetune": "x digits out --steps 1",
        "pretrain": "digits out --recipe digits",
        "evaluate": "x digits out",
    }
    command = [sys.executable, ROOT / f"training/{name}.py", *options[name].split()]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (result.returncode, result.stderr.count("\n")) == (130, 1)
