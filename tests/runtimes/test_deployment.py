"""Deployment folders: the script preprocesses and classifies like processor and model, which other tests
compare with the originals."""

import copy
import io
import json
import os
import re
import runpy
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from hf_vit import HfViTImageProcessor
from hf_vit.cli import main
from hf_vit.conversion import ConversionError, export
from hf_vit.files.predictions import ClassRule
from hf_vit.loading import save_folder
from hf_vit.models.image_processing_hf_vit import PRESETS, Normalize
from hf_vit.models.scores import stored_thresholds
from hf_vit.runtimes import deployment, runner

from ..paths import ROOT
from ..photographs import write_pictures
from ..tiny_models import tiny

SIZE = {"height": 20, "width": 36}
IMAGENET = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
RULES = [{"top_k": 3}, {"threshold": 0.2}, {"threshold": "auto"}, {"coverage": 0.9}, {"reject": True}]
WITHOUT_TORCH = """\
import runpy, sys
sys.modules.update(dict.fromkeys(["torch", "transformers", "hf_vit", "onnx"]))
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(scope="module")
def photographs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("photographs")
    write_pictures(folder)
    return sorted(folder.iterdir())


@pytest.fixture(scope="module")
def model():
    classifier = tiny(num_hidden_layers=1)
    torch.nn.init.normal_(classifier.classifier.weight)
    classifier.config.coverage_thresholds = {"0.9": 0.03}
    classifier.config.rejection_thresholds = [1.0 + index / 7 for index in range(11)]
    return classifier


@pytest.fixture(scope="module")
def program(model, onnxruntime):
    """Scaling of the presets, which share mean and deviation."""
    return deployment.make_onnx(model, (20, 36), scaling=Normalize(1 / 255, 0.5, 0.5).scale_and_offset())


@pytest.mark.parametrize("preset", [preset for preset in PRESETS if preset != "native"])
def test_the_same_pixels_and_classes_for_every_preset(preset, model, program, photographs, tmp_path, monkeypatch):
    monkeypatch.setattr(deployment, "make_onnx", lambda *arguments, **options: program)
    # a crop, where there is one, from a short side of 39 to 20: halves of 19 are rounded in two ways
    processor = HfViTImageProcessor(preset, size=SIZE, crop_pct=0.92, background=[200, 30, 90])
    for overwrite in (False, True):
        export(model, tmp_path / "deployed", "onnx", processor=processor, overwrite=overwrite)
    copies = tmp_path / "deployed" / "classifier"
    for name in deployment.RUNNER:
        assert (copies / name).read_bytes() == (ROOT / "hf_vit" / name).read_bytes()
    deployed = runner.Classifier(tmp_path / "deployed")
    scale, offset = Normalize(1 / 255, 0.5, 0.5).scale_and_offset()
    for path in photographs:
        inputs = processor(path, return_tensors="pt")
        pixel_values = torch.from_numpy(deployed.pixel_values(path)) * scale + offset
        assert torch.equal(pixel_values, inputs["pixel_values"]), path.name
        with torch.no_grad():
            logits = model(**inputs).logits
        scores = deployed.scores(deployed.logits(path))
        np.testing.assert_allclose(scores, logits.softmax(-1)[0], rtol=0, atol=1e-5, err_msg=path.name)
    for given in RULES:
        rule = ClassRule(model.config.id2label, stored_thresholds(model.config), **given)
        with torch.no_grad():
            logits = model(**processor(photographs, return_tensors="pt")).logits
        expected = rule.classes(logits.numpy(), logits.softmax(-1).numpy())
        batches = list(deployed.predict(photographs, batch_size=3, **given))
        assert [number for batch in batches for number in batch.numbers] == [*range(len(photographs))]
        found = [classes for batch in batches for classes in batch.outputs]
        assert [[one.label for one in image] for image in found] == [[one.label for one in image] for image in expected]


@pytest.mark.slow
@pytest.mark.parametrize(("to", "problem_type"), [("onnx", "multi_label_classification"), ("openvino", "regression")])
def test_the_command_writes_a_script_that_needs_no_torch(
    to, problem_type, model, photographs, tmp_path, capsys, monkeypatch, run_command
):
    for package in ("onnxscript", "onnxruntime") if to == "onnx" else ("openvino",):
        pytest.importorskip(package, reason=f"{package} is not installed")
    folder, deployed = tmp_path / "folder", tmp_path / "deployed"
    model = copy.deepcopy(model)
    model.config.id2label = {index: f"Bär {index}" for index in range(11)}
    model.config.problem_type = problem_type
    save_folder(folder, model, HfViTImageProcessor("augreg", size=SIZE, **IMAGENET))
    assert main(["export", str(folder), str(deployed), "--to", to]) == 0
    programs = {"onnx": {"model.onnx"}, "openvino": {"model.xml", "model.bin"}}[to]
    written = {".hf_vit", "program.json", "labels.json", "preprocessing.json", "thresholds.json", "predict.py"}
    assert {path.name for path in deployed.iterdir()} == programs | written | {"classifier"}
    assert json.loads((deployed / "preprocessing.json").read_text())["image_std"] == IMAGENET["image_std"]
    capsys.readouterr()

    images = [str(path) for path in photographs[:3]]
    expected = run_command(["predict", folder, *images])
    deployed = deployed.rename(tmp_path / "elsewhere")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"PYTHONUTF8": "1"}

    def run_script(*images):
        command = [sys.executable, "-W", "error", "-c", WITHOUT_TORCH, str(deployed / "predict.py"), *images]
        return subprocess.run(command, capture_output=True, encoding="utf-8", cwd="/", env=environment)

    done = run_script(*images)
    assert done.returncode == 0, done.stderr
    number = r"-?\d+\.\d+"  # the last digit is free, since a program rounds sums in another order
    assert re.sub(number, "", done.stdout) == re.sub(number, "", expected)
    assert done.stdout == run_command(["predict", deployed, *images])
    scores = [[float(score) for score in re.findall(number, text)] for text in (done.stdout, expected)]
    np.testing.assert_allclose(*scores, rtol=0, atol=2e-4 if problem_type == "regression" else 0.11)

    monkeypatch.setattr(sys, "argv", ["predict.py", "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(deployed / "predict.py"), run_name="__main__")
    assert ended.value.code == 0
    assert "IMAGE" in capsys.readouterr().out

    (tmp_path / "some").mkdir()
    for path in photographs[:2]:
        shutil.copy(path, tmp_path / "some")
    (tmp_path / "some" / "text.jpg").write_text("no image")
    Image.open(photographs[0]).convert("RGB").save(tmp_path / "some" / "postscript.jpg", "EPS")  # starts a program
    Image.new("1", (13_300, 13_300)).save(tmp_path / "some" / "huge.png")
    done = run_script(str(tmp_path / "some"))
    assert done.returncode == 1
    assert done.stdout.count("some/") == 2
    for name, reason in (("text.jpg", "JPEG2000"), ("postscript.jpg", "JPEG2000"), ("huge.png", "13300")):
        assert re.search(f"{tmp_path / 'some' / name}\\W.*{reason}", done.stderr)


@pytest.mark.parametrize("encoding", ["cp1252", "ascii", "utf-8"])
def test_names_that_the_terminal_cannot_write(encoding, model, program, photographs, tmp_path, monkeypatch):
    """Class and file names in other alphabets, and control characters, are written as `hf-vit` writes them."""
    monkeypatch.setattr(deployment, "make_onnx", lambda *arguments, **options: program)
    model = copy.deepcopy(model)
    model.config.id2label = {index: f"\x1b[31m Bär кошка 猫 {index}" for index in range(11)}
    processor = HfViTImageProcessor(size=SIZE)
    export(model, tmp_path / "deployed", "onnx", processor=processor)
    save_folder(tmp_path / "folder", model, processor)
    image = shutil.copy(photographs[0], tmp_path / "снимок.png")
    written = {}
    for name in ("predict.py", "hf-vit"):
        terminal = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", terminal)
            if name == "hf-vit":
                assert main(["predict", str(tmp_path / "folder"), str(image)]) == 0
            else:
                patch.setattr(sys, "argv", [name, str(image)])
                with pytest.raises(SystemExit, match=r"^0$"):
                    runpy.run_path(str(tmp_path / "deployed" / name), run_name="__main__")
        terminal.flush()
        written[name] = terminal.buffer.getvalue()
    assert written["predict.py"] == written["hf-vit"]
    assert written["predict.py"].count(b"\n") == 6


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"preset": "native"}, "patches"),
        ({"num_channels": 1}, "num_channels"),
        ({"reduced_decoding": True}, "reduced_decoding"),
    ],
)
def test_unsupported_preprocessing_is_refused(settings, message, model, tmp_path):
    processor = HfViTImageProcessor(**{"size": SIZE, **settings})
    with pytest.raises(ConversionError, match=message):
        export(model, tmp_path / "deployed", "onnx", processor=processor)
    assert not list(tmp_path.iterdir())


def test_other_bad_input_is_refused(model, tmp_path):
    processor = HfViTImageProcessor(size=SIZE)
    for options, message in (({}, "NoneType"), ({"processor": processor, "size": "dynamic"}, "'dynamic'")):
        with pytest.raises(ConversionError, match=message):
            export(model, tmp_path / "folder", "openvino", **options)
    with pytest.raises(ConversionError, match="classifier"):
        export(tiny(pooling="none", use_cls_token=True), tmp_path / "folder", "onnx", processor=processor)
    assert not list(tmp_path.iterdir())
