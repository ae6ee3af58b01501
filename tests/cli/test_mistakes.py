"""Mistakes that users make: one line on standard error and exit status 2, and nothing is written."""

import json
import os
import re
import shlex
import shutil
import sys
from typing import Any, cast

import pytest
import torch

import hf_vit
from hf_vit import HfViTForImageClassification, HfViTHybridForImageClassification, HfViTImageProcessor
from hf_vit.cli import main
from hf_vit.conversion import convert

from ..paths import GOLDENS
from ..photographs import write_colors
from ..tiny_models import save_tiny, tiny, write_images

# What is typed after `hf-vit`, in a folder with what `place` makes.
COMMANDS = [
    # convert
    "convert ./nothing out",
    "convert empty.npz out",
    "convert empty out",
    "convert page.npz out",
    "convert lfs.safetensors out",
    "convert weights.h5 out",
    "convert model out",
    "convert bert out",
    "convert vit.npz yours",
    "convert vit.npz yours --overwrite",
    "convert vit.npz vit.npz/out",
    "convert vit.npz out --labels three.txt",
    "convert vit.npz out --image-size 33",
    "convert vit.npz out --set hiden_size=3",
    "convert vit.npz out --set overwrite=true",
    "convert vit.npz out --set where=3",
    "convert vit.npz out --image-size 32 --set image_size=48",
    "convert vit.npz out --images pets",
    "convert augreg:best:X/16 out",
    # export
    "export model out.npz",
    "export hybrid out --to transformers",
    "export model vit.npz --to jax",
    "export model model --to timm --overwrite",
    "export model out.pt2 --to torch-export --size any",
    "export model hybrid --to onnx --overwrite",
    # predict, inspect, demo
    "evalute model --dataset pets",
    "predict modle photo.png",
    "predict '' photo.png",
    "predict model photo.png --format csv --json",
    "predict model photo.png --threshold nan",
    "inspect R50+B/16 --output out",
    "predict empty photo.png",
    "predict model nothing.jpg",
    "predict noweights photo.png",
    "embed model photo.png --output f.csv --device cuda --backend openvino",
    "predict model photo.png --top-k 0",
    "predict model photo.png --image-column x",
    "predict model photo.png --output a.parquet",
    "predict model '~$photo.png'",
    "predict model photo.png -dash.png",
    "predict nan photo.png",
    "quantize model model --calibrate flat --overwrite",
    "inspect model --output out --image-size 21",
    "inspect model --output hybrid --overwrite",
    "demo model --static model --overwrite",
    "demo model --static pets",
    "demo model --examples empty",
    "demo model --runtime empty",
    "demo model --port 99999",
    # finetune, pretrain, evaluate
    "finetune",
    "{finetune} --dataset pets --epochs 1 --dry-run",
    "{finetune} --dataset pets --epochs 1 --push ''",
    "{finetune} --job",
    "plan pets model --minutes nan",
    "{finetune} --dataset ./nothing --epochs 1",
    "{finetune} --dataset pets",
    "{finetune} --dataset flat --epochs 1",
    "{finetune} --dataset halfempty --epochs 1",
    "{finetune} --dataset pets --epochs 1 --train-split tst",
    "{finetune} --dataset pets --epochs 1 --label-names three.txt",
    "finetune --dataset pets --epochs 1 --output-dir yours --model model",
    "pretrain --dataset pets --epochs 1 --output-dir out --variant Q/9",
    # the rest
    "catalog nothing",
    "catalog siglip2 --limit 2",
    "catalog B/16 --index none.csv",
    "compute B/16 --image-size 100",
    "compute B/16 --dataset-size nan",
    "compute vit.npz",
    "compute --table 6 --output out.xyz",
    "compute --table 2 --image-size 32",
    "shard ./nothing out",
    "shard pets pets/out",
    "push empty me/x --dry-run",
    "card vit.npz",
    "card broken",
    "card --published out --name x",
    "quantize model out --calibrate photo.png",
]
# A package that is not installed, a command that needs it, and what to install.
MISSING = [
    ("accelerate", "finetune"),
    ("datasets", "predict model --dataset digits --split test"),
    ("matplotlib", "inspect model --output out"),
    ("onnx", "export model out.onnx --to onnx"),
    ("onnxscript", "demo model"),
    ("openvino", "predict model photo.png --backend openvino"),
    ("pyarrow", "embed model photo.png --output f.parquet"),
]
PYTHON = [
    lambda: hf_vit.load("me/no", local_files_only=True),
    lambda: HfViTHybridForImageClassification.from_pretrained("model"),
    lambda: HfViTForImageClassification.from_pretrained("hybrid"),
    lambda: HfViTForImageClassification.from_pretrained("noconfig"),
    lambda: hf_vit.load("model", output_loading_info=True),
    lambda: HfViTForImageClassification.from_pretrained("model", num_labels="ten"),
    lambda: tiny()(torch.zeros(1, 20, 36, 3)),
    lambda: convert(cast("Any", tiny())),
    lambda: HfViTImageProcessor()([]),
]


@pytest.fixture(scope="module")
def _made(tmp_path_factory):
    """Make models, checkpoints, photographs and files of other kinds."""
    place = tmp_path_factory.mktemp("mistakes")
    save_tiny(place / "model")
    save_tiny(place / "hybrid", hybrid=True)
    model, _ = hf_vit.load(save_tiny(place / "nan"))
    torch.nn.init.constant_(model.classifier.bias, float("nan"))
    model.save_pretrained(place / "nan")
    shutil.copy(GOLDENS / "vit_token.npz", place / "vit.npz")
    files = {
        "empty.npz": b"",
        "weights.h5": b"\x89HDF\r\n\x1a\n" + bytes(50),
        "page.npz": b"<!DOCTYPE html><html></html>",
        "lfs.safetensors": b"version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 12\n",
        "three.txt": b"a\nb\nc\n",
        "yours/thesis.txt": b"four years",
        "bert/config.json": json.dumps({"model_type": "bert", "architectures": ["BertModel"]}).encode(),
        "noweights/config.json": (place / "model/config.json").read_bytes(),
        "noconfig/model.safetensors": (place / "model/model.safetensors").read_bytes(),
        "broken/config.json": (place / "model/config.json").read_bytes(),
        "broken/README.md": b"---\nlicense: [mit\ntags: {\n---\n",
        "-dash.png": b"",
    }
    for name, content in files.items():
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_bytes(content)
    (place / "empty").mkdir()
    write_images(place / "flat", count=1)
    write_colors(place / "pets", ("blue", "red"), train=1, val=1)
    shutil.copytree(place / "pets", place / "halfempty")
    (place / "halfempty/train/red/0.png").unlink()
    shutil.copy(place / "flat/00.png", place / "photo.png")
    return place


@pytest.fixture
def place(_made, monkeypatch, fresh_accelerator):
    """The working directory, which a mistake leaves as it was."""
    monkeypatch.chdir(_made)
    before = sorted(_made.rglob("*"))
    yield
    assert sorted(_made.rglob("*")) == before


def said(command, capsys) -> str:
    """Run a command that must fail, with the arguments of `{finetune}` filled in; the last line that it prints."""
    command = command.replace("{finetune}", "finetune --model model --output-dir out --num-workers 0")
    try:
        status = main(shlex.split(command))
    except SystemExit as end:  # argparse's
        status = end.code
    error = capsys.readouterr().err
    assert status == 2, error
    assert "Traceback" not in error
    return re.split(r"[\n\r]", error.strip())[-1]


@pytest.mark.parametrize("command", COMMANDS)
def test_commands(command, place, capsys):
    assert said(command, capsys).startswith(("hf-vit", "error: "))


@pytest.mark.parametrize(("package", "command"), MISSING, ids=[package for package, _ in MISSING])
def test_a_missing_extra(package, command, place, capsys, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.setitem(sys.modules, name, None)
    for name in sorted(sys.modules, reverse=True):  # a module before its package
        if not name.startswith(("hf_vit.training", "hf_vit.data")):
            continue
        parent, _, child = name.rpartition(".")
        monkeypatch.setattr(sys.modules[parent], child, sys.modules[name])  # an import sets it anew
        monkeypatch.delitem(sys.modules, name)  # they import it at their beginning
    monkeypatch.setitem(sys.modules, package, None)
    message = said(command, capsys)
    assert package in message
    assert "pip install" in message


@pytest.mark.parametrize("call", PYTHON)
def test_python(call, place):
    with pytest.raises((ValueError, OSError)) as error:
        call()
    assert "\n" not in str(error.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_no_permission(tmp_path, capsys):
    tmp_path.chmod(0o555)
    assert "Permission denied" in said(f"convert {GOLDENS / 'vit_token.npz'} {tmp_path / 'out'}", capsys)


@pytest.mark.parametrize("command", ["finetune", "evaluate", "audit", "calibrate", "quantize"])
def test_the_model_comes_first(command, place, capsys):
    assert f"hf-vit {command} model pets" in said(f"{command} pets model out", capsys)
