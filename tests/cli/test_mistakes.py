"""Mistakes that users make, each with the sentence they get: what is wrong, what was expected, what to do."""

import json
import os
import re
import shlex
import shutil
import sys
from typing import Any, cast

import numpy as np
import pytest
import torch
from PIL import Image

import hf_vit
from hf_vit import HfViTConfig, HfViTForImageClassification, HfViTHybridForImageClassification, HfViTImageProcessor
from hf_vit.cli import main
from hf_vit.conversion import convert

from ..paths import GOLDENS
from ..tiny_models import save_tiny, tiny

# What is typed after `hf-vit`, in a folder with what `place` makes, and the end of the sentence on standard error.
COMMANDS = [
    # convert
    ("conver vit.npz out", "there is no command conver; did you mean convert? (hf-vit --help lists them)"),
    ("convert ./nothing out", "nothing does not exist"),
    ("convert empty.npz out", "empty.npz is empty (0 bytes; expected a checkpoint): copy or download it again"),
    ("convert empty.safetensors out", "is empty (0 bytes; expected a checkpoint): copy or download it again"),
    ("convert empty out", "empty is an empty folder"),
    ("convert photo.png out", "photo.png is a PNG image (expected a checkpoint)"),
    ("convert page.npz out", "page.npz is a web page (expected a checkpoint): download the file itself"),
    ("convert lfs.safetensors out", "is a Git LFS pointer (expected a checkpoint): fetch the file itself with"),
    ("convert weights.h5 out", "is a Keras model in HDF5, which hf_vit does not read; convert weights.npz instead"),
    ("convert flat out", "flat must hold one checkpoint (.npz, .safetensors, .pth, .pt, .bin, .msgpack, an Orbax"),
    ("convert model out", "model is in the format of hf_vit already; hf_vit converts vit, vit_mae, vit-hybrid and bit"),
    ("convert bert out", "bert holds a bert model; hf_vit converts vit, vit_mae, vit-hybrid and bit of transformers"),
    ("convert vit.npz", "cannot convert: no output folder; give one, or --check"),
    ("convert vit.npz yours", "yours exists; give --overwrite (overwrite=True) to replace it"),
    ("convert vit.npz yours --overwrite", "yours: it holds thesis.txt, which hf_vit did not write; nothing was change"),
    ("convert vit.npz vit.npz/out", "vit.npz/out: vit.npz is a file (expected a folder); choose another place"),
    ("convert vit.npz out --labels three.txt", "3 labels are given, but the head has 10 classes"),
    (
        "convert vit.npz out --labels none.txt",
        "cannot read labels 'none.txt': no such file (expected a file or imagenet1k)",
    ),
    ("convert vit.npz out --image-size 33", "image height 33 is not a multiple of 8, the height of a patch in pixels"),
    ("convert vit.npz out --image-size big", "--image-size: cannot read 'big' as a size (expected N or HxW"),
    ("convert vit.npz out --imagesize 32", "there is no option --imagesize; did you mean --image-size?"),
    ("convert vit.npz out --set hiden_size=3", "HfViTConfig does not know hiden_size (did you mean hidden_size?)"),
    ("convert vit.npz out --set hidden_size=a", "hidden_size is 'a'; expected int"),
    ("convert vit.npz out --image-size 32 --set image_size=48", "image_size is given twice, with --set and its own op"),
    ("convert augreg:best:X/16 out", "AugReg has no 'X/16' (expected Ti/16, S/32, S/16, B/32, B/16, B/8, L/16"),
    # export
    ("export model out.npz", "the following arguments are required: --to"),
    ("export model out.npz --to keras", "invalid choice: 'keras' (choose from 'jax', 'transformers', 'timm', 'onnx'"),
    ("export hybrid out --to transformers", "transformers has no ViT behind a ResNet"),
    (
        "export model out --to onnx --dialect flax",
        "cannot export to onnx with a dialect or beside (expected jax); leav",
    ),
    ("export model model --to timm --overwrite", "model: it is the folder of model, or around it; name another place"),
    ("export model hybrid --to onnx --overwrite", "cannot replace hybrid: it holds a model (model.safetensors); nothi"),
    # predict, inspect, demo
    ("predict ./nothing photo.png", "there is no folder ./nothing (expected a folder of a model, or owner/name on t"),
    ("predict modle photo.png", "`hf-vit catalog` lists them); did you mean model?"),
    ("embed ./no/where photo.png --output f.csv", "there is no folder ./no/where (expected a folder of a model, o"),
    ("inspect R50+B/16 --output out", "there is no folder R50+B/16 (expected a folder of a model, or owner/name on"),
    ("predict empty photo.png", "empty is an empty folder"),
    ("predict photo.png model", "model holds no images (expected files that end in .jpg"),
    ("predict model nothing.jpg", "no such file: nothing.jpg"),
    ("predict model text.jpg", "text.jpg is not an image"),
    ("predict noweights photo.png", "no file named model.safetensors, or pytorch_model.bin, found in directory now"),
    ("embed model photo.png --output f.csv --device cuda:99", "; `hf-vit env` lists the devices"),
    ("embed model photo.png --output f.csv --device cuda --backend openvino", "computes on the CPU, but --device is "),
    ("predict model photo.png --top-k 0", "--top-k is 0; it must be at least 1"),
    ("predict model photo.png --top-k five", "argument --top-k: invalid int value: 'five'"),
    ("predict model photo.png --batch-size 0", "--batch-size is 0; it must be at least 1"),
    ("predict model photo.png --image-column x", "--image-column needs --dataset or a .parquet file"),
    ("predict model photo.png --output a.parquet", "--output is a.parquet (expected a name that ends in .txt, .csv, "),
    ("predict model '~$photo.png'", "no such file: ~$photo.png"),
    ("predict model -- --no_such.png", "no such file: --no_such.png"),
    ("predict model photo.png -dash.png", "there is no option -dash.png; write ./-dash.png for the file"),
    ("predict nan photo.png", "cannot classify images: the model computes NaN or infinite logits"),
    ("quantize model model --calibrate flat --overwrite", "model: it is the folder of model, or around it; name anot"),
    ("inspect model --output out --image-size 21", "image height 21 is not a multiple of 4, the height of a patch"),
    ("inspect model --output hybrid --overwrite", "cannot replace hybrid: it holds a model (model.safetensors); noth"),
    ("inspect model --output out --flow", "--flow needs --image, the images to draw it for"),
    ("demo model --wheel x.whl", "--wheel needs --space"),
    ("demo model --space out --port 7000", "--port has no effect on --space, which only writes files; leave it out"),
    ("demo model --space pets", "pets exists; name a new folder for the Space"),
    ("demo model --space out --wheel photo.png", "photo.png is not a wheel of hf_vit"),
    ("demo model --examples empty", "empty holds no images (expected files that end in .jpg"),
    ("demo model --port 99999", "--port is 99999; it must be at least 1 and at most 65535"),
    # finetune, pretrain, evaluate
    ("finetune", "no data: set --dataset to a Hub name, a folder, a file or digits"),
    ("finetune --dataset pets", "no folder for the result: set --output-dir"),
    ("{finetune} --dataset ./nothing --epochs 1", "cannot read split 'train' of ./nothing: there is no folder ./noth"),
    ("{finetune} --dataset pets", "set one of steps and epochs; none is set. Try --epochs 10"),
    ("{finetune} --dataset pets --epochs 1 --steps 2", "set one of steps and epochs; both are (2 and 1.0) set"),
    ("{finetune} --dataset pets --epochs many", "--epochs is 'many'; it must be float or none"),
    ("{finetune} --dataset pets --steps 5 --warmup-steps 9", "--warmup-steps (9) must be less than --steps (5)"),
    ("{finetune} --dataset pets --steps 5 --mixup-alpha -1", "--mixup-alpha is -1.0; it must be at least 0"),
    ("{finetune} --dataset pets --learning-rte 1", "there is no option --learning-rte; did you mean --learning-rate?"),
    ("{finetune} --dataset flat --epochs 1", "the images have no classes (columns: image (Image)); make a folder of"),
    ("{finetune} --dataset one --epochs 1", "make a folder of images for each of two classes or more (FOLDER/CLASS/"),
    ("{finetune} --dataset halfempty --epochs 1", "the images have no classes (columns: image (Image), label (ClassLa"),
    (
        "{finetune} --dataset pets --epochs 1 --train-split tst",
        "'tst' of pets: there is no split 'tst', only train, valid",
    ),
    ("{finetune} --dataset pets --epochs 1 --image-size 33", "image height 33 is not a multiple of 4, the height of a"),
    ("{finetune} --dataset pets --epochs 1 --label-names three.txt", "(2: 'cat', 'dog') are not those of three.txt"),
    ("finetune --dataset pets --epochs 1 --output-dir out --model ./nothing", "there is no folder ./nothing (expect"),
    ("finetune --dataset pets --epochs 1 --output-dir out --model bert", "a model of type bert, which cannot classify"),
    ("finetune --dataset pets --epochs 1 --output-dir yours --model model", "yours is not empty: continue it with --"),
    ("finetune --recipe fintune_small", "lists them); did you mean finetune_small?"),
    ("pretrain --dataset pets --epochs 1 --output-dir out --variant Q/9", "unknown variant 'Q/9'; known: Ti/16, S"),
    ("evaluate --model vit.npz --dataset pets", "vit.npz is a file (expected a folder that convert, training or save"),
    ("evaluate --model model --dataset pets --split tst", "there is no split 'tst', only train, validation"),
    ("evaluate --model model --dataset pets --protocol acuracy", "protocol is 'acuracy'; it must be accuracy or real"),
    # the rest
    ("catalog nothing", "cannot explain 'nothing': it is no released file, no architecture (expected Ti/16, S/32"),
    ("catalog siglip2 --resolution 224", "--resolution needs an architecture such as B/16; siglip2 is none"),
    ("catalog B/16 --limit 0", "--limit is 0; it must be at least 1"),
    ("catalog B/16 --index none.csv", "cannot use none.csv: No such file or directory"),
    ("compute B/16 --image-size 100", "image height 100 is not a multiple of 16, the height of a patch in pixels; t"),
    ("compute model --epochs 9", "--epochs needs --dataset-size, the images per epoch"),
    ("compute --table 2 --image-size 32", "--image-size needs a model"),
    ("recipes show", "show needs a name; `hf-vit recipes` lists them"),
    ("shard ./nothing out", "cannot read ./nothing: there is no folder ./nothing"),
    ("shard pets pets/out", "cannot write pets/out inside pets, the folder of the images; name another folder"),
    ("push empty me/x --dry-run", "empty holds no config.json; give a folder that save_pretrained, convert or train"),
    ("card vit.npz", "vit.npz holds no config.json; give a folder that save_pretrained, convert or training wrote"),
    ("card bert", "cannot write a card: config.json names BertModel (expected a model of hf_vit)"),
    ("card broken", "cannot read the front matter of README.md: while parsing"),
    ("card --published out --name x", "--name has no effect on --published; leave it out"),
    ("quantize model out --calibrate photo.png", "cannot calibrate with 1 images (expected at least 16, better 300"),
]
# A package that is not installed, a command that needs it, and what to install.
MISSING = [
    ("accelerate", "finetune", "this needs accelerate, which is not installed: pip install 'hf_vit[training]'"),
    ("matplotlib", "inspect model --output out", "matplotlib, which is not installed: pip install 'hf_vit[analysis]'"),
    ("onnx", "export model out.onnx --to onnx", "onnx is not installed: pip install 'hf_vit[export]'"),
    ("gradio", "demo model", "this needs gradio, which is not installed: pip install 'hf_vit[demo]'"),
    ("openvino", "predict model photo.png --backend openvino", "is not installed: pip install 'hf_vit[openvino]'"),
]
PYTHON = [
    (lambda: hf_vit.load("./nothing"), "there is no folder ./nothing (expected a folder of a model, or owner/name"),
    (lambda: HfViTForImageClassification.from_pretrained("nonsense"), "there is no folder nonsense (expected a folder"),
    (lambda: HfViTImageProcessor.from_pretrained("./nothing"), "there is no folder ./nothing (expected a folder of"),
    (lambda: hf_vit.load("me/no", local_files_only=True), "there is no folder me/no; as a name on the Hub: We could"),
    (lambda: hf_vit.load("model", preset="imagenet"), "preset is 'imagenet'; it must be one of vit_jax, augreg"),
    (
        lambda: HfViTHybridForImageClassification.from_pretrained("model"),
        "model holds a model of type hf_vit (expected ",
    ),
    (lambda: HfViTForImageClassification.from_pretrained("hybrid"), "use HfViTHybridForImageClassification or hf_vit."),
    (lambda: HfViTForImageClassification.from_pretrained("noconfig"), "noconfig holds no config.json (expected a fold"),
    (lambda: HfViTForImageClassification.from_pretrained("model", num_labels="ten"), "num_labels is 'ten'; it must be"),
    (lambda: HfViTConfig(hidden_size=100, num_attention_heads=7), "(100) is not a multiple of num_attention_heads (7)"),
    (lambda: tiny()(torch.zeros(1, 20, 36, 3)), "shape (1, 20, 36, 3); expected (batch, 3, height, width)"),
    (
        lambda: convert(cast("Any", tiny())),
        "source is a HfViTForImageClassification (expected a path, an address, or a",
    ),
    (lambda: HfViTImageProcessor(size="large"), "size is 'large'; expected int"),
    (lambda: HfViTImageProcessor()([]), "there are no images to process"),
    (
        lambda: HfViTImageProcessor()(cast("Any", 3)),
        "expected a path, URL, bytes, PIL image, NumPy array or tensor, got int",
    ),
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
        "empty.safetensors": b"",
        "weights.h5": b"\x89HDF\r\n\x1a\n" + bytes(50),
        "text.jpg": b"no picture",
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
    (place / "halfempty/train/dog").mkdir(parents=True)
    pixels = np.random.default_rng(0).integers(0, 255, (24, 40, 3), np.uint8)
    pets = [f"pets/{split}/{animal}/0.png" for split in ("train", "val") for animal in ("cat", "dog")]
    half = [name.replace("pets", "halfempty") for name in pets if "train/dog" not in name]
    for name in ("photo.png", "flat/0.png", "one/train/cat/0.png", *pets, *half):
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(place / name)
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


@pytest.mark.parametrize(("command", "sentence"), COMMANDS, ids=[command for command, _ in COMMANDS])
def test_commands(command, sentence, place, capsys):
    assert sentence in said(command, capsys)


@pytest.mark.parametrize(("package", "command", "sentence"), MISSING, ids=[package for package, *_ in MISSING])
def test_a_missing_extra(package, command, sentence, place, capsys, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.setitem(sys.modules, name, None)
    for name in ("hf_vit.scripts.finetune", "hf_vit.training.build"):  # which import it at their beginning
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    assert sentence in said(command, capsys)


@pytest.mark.parametrize(("call", "sentence"), PYTHON, ids=[sentence[:30] for _, sentence in PYTHON])
def test_python(call, sentence, place):
    with pytest.raises((ValueError, OSError), match=re.escape(sentence)) as error:
        call()
    assert "\n" not in str(error.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_no_permission(tmp_path, capsys):
    tmp_path.chmod(0o555)
    assert "Permission denied" in said(f"convert {GOLDENS / 'vit_token.npz'} {tmp_path / 'out'}", capsys)
