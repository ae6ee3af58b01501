"""Every way into the package decodes a JPEG to the pixels of TensorFlow: one row for each door."""

import csv
import io
import json
import tarfile

import datasets
import numpy as np
import pytest
import torch
from accelerate import Accelerator
from PIL import Image
from safetensors.numpy import load_file

import hf_vit
from hf_vit.auditing.audit import measure
from hf_vit.cli import main
from hf_vit.conversion import export
from hf_vit.data.augmentation import TrainTransform
from hf_vit.data.sources import load_split
from hf_vit.data.splits import open_split
from hf_vit.inference.predictions import EvaluationBatches
from hf_vit.runtimes.runner import Classifier
from hf_vit.settings.fields import EvaluateSettings

from ..paths import GOLDENS
from ..tiny_models import save_tiny

DECODED = np.load(GOLDENS / "jpeg.npz")
KINDS = sorted(name.removesuffix("/decode_jpeg") for name in DECODED.files if name.endswith("/decode_jpeg"))
PIXELS = DECODED["420/decode_jpeg"]  # (height, width, 3), by TensorFlow


@pytest.fixture(scope="module")
def photograph(tmp_path_factory):
    """The same JPEG as a file, as a row of parquet, and in a tar."""
    folder = tmp_path_factory.mktemp("photograph")
    content = DECODED["420/bytes"].tobytes()
    (folder / "image.jpg").write_bytes(content)
    for name in ("cat", "dog"):
        (folder / "images" / "train" / name).mkdir(parents=True)
        (folder / "images" / "train" / name / "image.jpg").write_bytes(content)
    rows = datasets.Dataset.from_dict({"image": [{"bytes": content, "path": None}], "label": [0]})
    rows = rows.cast(datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat"])}))
    (folder / "parquet").mkdir()
    rows.to_parquet(folder / "parquet" / "train-0.parquet")
    (folder / "tars").mkdir()
    with tarfile.open(folder / "tars" / "train-0.tar", "w", format=tarfile.USTAR_FORMAT) as archive:
        for name, data in (("0.jpg", content), ("0.cls", b"0")):
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return folder / "image.jpg"


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    folder = save_tiny(tmp_path_factory.mktemp("models") / "tiny")
    model, processor = hf_vit.load(folder)
    with torch.no_grad():
        model.classifier.weight.mul_(30)  # so that a level more or less shows
    processor.update(jpeg_dct="fast")
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def pair(model_folder):
    return hf_vit.load(model_folder)


def probabilities(pair, image, **options):
    model, processor = pair
    with torch.no_grad():
        return model(**processor(image, return_tensors="pt", **options)).logits[0].softmax(-1).numpy()


def of_split(pair, samples):
    """Probabilities by the batches of an evaluation, which are those of features and calibration too."""
    model, processor = pair
    settings = EvaluateSettings(eval_batch_size=2, num_workers=0)
    batches = EvaluationBatches(settings, open_split(samples), processor, model.config, Accelerator(cpu=True))
    batch = batches.on_device(next(iter(batches)))
    with torch.no_grad():
        return model(batch["image"][:1]).logits[0].softmax(-1).numpy()


def of_command(pair, folder, image, capsys):
    assert main(["predict", str(folder), str(image), "--top-k", "11", "--format", "jsonl"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[0])
    scores = {entry["label"]: entry["score"] for entry in found["predictions"]}
    return np.array([scores[label] for _, label in sorted(pair[0].config.id2label.items())])


def of_predictions(pair, predictions):
    scores = dict(predictions)
    return np.array([scores[label] for _, label in sorted(pair[0].config.id2label.items())])


def of_features(pair, features):
    with torch.no_grad():
        return pair[0].classifier(torch.from_numpy(features)).softmax(-1)[0].numpy()


# Door -> the probabilities of the model, (11,)
DOORS = {
    "path": lambda pair, path, **_: probabilities(pair, path),
    "text": lambda pair, path, **_: probabilities(pair, str(path)),
    "bytes": lambda pair, path, **_: probabilities(pair, path.read_bytes()),
    "open file": lambda pair, path, **_: probabilities(pair, io.BytesIO(path.read_bytes())),
    "row of datasets": lambda pair, path, **_: probabilities(pair, {"bytes": path.read_bytes(), "path": None}),
    "PIL image, not decoded": lambda pair, path, **_: probabilities(pair, Image.open(io.BytesIO(path.read_bytes()))),
    "predict": lambda pair, path, **_: of_predictions(pair, hf_vit.predict(pair, path, top_k=11)[0]),
    "predict, bytes": lambda pair, path, **_: of_predictions(pair, hf_vit.predict(pair, path.read_bytes(), 11)[0]),
    "embed": lambda pair, path, **_: of_features(pair, hf_vit.embed(pair, [path])),
    "hf-vit predict": lambda pair, path, folder, capsys, **_: of_command(pair, folder, path, capsys),
    "hf-vit predict, parquet": lambda pair, path, folder, capsys, **_: of_command(
        pair, folder, path.parent / "parquet" / "train-0.parquet", capsys
    ),
    "evaluation, folder": lambda pair, path, **_: of_split(pair, load_split(str(path.parent / "images"), "train")),
    "evaluation, parquet": lambda pair, path, **_: of_split(pair, load_split(str(path.parent / "parquet"), "train")),
    "evaluation, tar": lambda pair, path, **_: of_split(
        pair, load_split(str(path.parent / "tars"), "train", streaming=True)
    ),
}


@pytest.mark.parametrize("door", DOORS)
def test_the_same_pixels_through_every_door(door, pair, photograph, model_folder, capsys):
    expected = probabilities(pair, PIXELS)
    by_pillow = probabilities(pair, photograph, jpeg_dct="accurate")
    assert np.abs(by_pillow - expected).max() > 1e-4  # the decoders differ
    found = DOORS[door](pair, photograph, folder=model_folder, capsys=capsys)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


# Commands that write a file. Each gets a folder of JPEGs, of PNGs with TensorFlow's pixels, and of PNGs with Pillow's.


@pytest.fixture(scope="module")
def twins(tmp_path_factory):
    """The larger JPEGs of jpeg.npz as split/class/number, but for CMYK, and for EXIF, which TensorFlow ignores."""
    root = tmp_path_factory.mktemp("twins")
    kinds = [kind for kind in KINDS if min(DECODED[f"{kind}/decode_jpeg"].shape[:2]) > 40]
    kinds = sorted({*kinds} - {"cmyk", "orientation_6"})
    for number, kind in enumerate(kinds * 2):
        content = DECODED[f"{kind}/bytes"].tobytes()
        pixels = {
            "tensorflow": Image.fromarray(DECODED[f"{kind}/decode_jpeg"]),
            "pillow": Image.open(io.BytesIO(content)).convert("RGB"),
        }
        for name in ("jpeg", *pixels):
            for split in ("train", "test"):
                folder = root / name / split / ("cat", "dog")[number % 2]
                folder.mkdir(parents=True, exist_ok=True)
                if name == "jpeg":
                    (folder / f"{number:02}.jpg").write_bytes(content)
                else:
                    pixels[name].save(folder / f"{number:02}.png")
    return root


def of_embed(model, images, output):
    assert main(["embed", str(model), str(images / "test"), "--output", f"{output}.npz"]) == 0
    return np.load(f"{output}.npz")["features"]


def of_evaluate(model, images, output):
    assert main(["evaluate", str(model), str(images), str(output), "--split", "test", "--num-workers", "0"]) == 0
    with open(output / "predictions.csv", newline="") as file:
        return [float(row["probability"]) for row in csv.DictReader(file)]


def of_finetune(model, images, output):
    options = ["--steps", "2", "--batch-size", "4", "--crop", "none", "--flip", "false", "--num-workers", "0"]
    assert main(["finetune", str(model), str(images), str(output), *options]) == 0
    return load_file(output / "model.safetensors")["classifier.weight"]


def of_quantize(model, images, output):
    assert main(["quantize", str(model), str(images / "train"), str(output)]) == 0
    quantized, _ = hf_vit.load(output)
    with torch.no_grad():
        return quantized(torch.linspace(-1, 1, 3 * 20 * 36).view(1, 3, 20, 36)).logits.numpy()


def of_calibrate(model, images, output):
    assert main(["calibrate", str(model), str(images), str(output), "--split", "test"]) == 0
    return json.loads((output / "calibration.json").read_text())["expected_calibration_error"]["after"]


@pytest.mark.parametrize(
    "door", [of_embed, of_evaluate, of_finetune, pytest.param(of_quantize, marks=pytest.mark.slow), of_calibrate]
)
def test_commands_compute_with_the_pixels_of_tensorflow(door, model_folder, twins, tmp_path):
    found = {name: door(model_folder, twins / name, tmp_path / name) for name in ("jpeg", "tensorflow", "pillow")}
    np.testing.assert_array_equal(found["jpeg"], found["tensorflow"])
    assert not np.array_equal(found["jpeg"], found["pillow"])


def test_exported_folders_have_the_same_pixels(pair, photograph, tmp_path, onnxruntime):
    model, processor = pair
    export(model, tmp_path / "deployed", "onnx", processor=processor)
    levels = processor(PIXELS, do_rescale=False, do_normalize=False, return_tensors="np").pixel_values
    np.testing.assert_array_equal(Classifier(tmp_path / "deployed").pixel_values(photograph), levels)


def test_training_decodes_the_same_pixels(photograph):
    height, width = PIXELS.shape[:2]
    transform = TrainTransform((height, width), "none", flip=False)
    found = transform.load({"path": str(photograph), "bytes": None}, np.random.default_rng(0))
    np.testing.assert_array_equal(found["image"], PIXELS)


def test_an_audit_measures_the_file_as_the_png_of_its_pixels(tmp_path):
    """A photograph that is large enough for reduced decoding."""
    coarse = np.random.default_rng(0).integers(0, 256, (30, 40, 3), np.uint8)
    jpeg, png = io.BytesIO(), io.BytesIO()
    Image.fromarray(coarse).resize((1600, 1200), Image.Resampling.BICUBIC).save(jpeg, "JPEG")
    Image.open(jpeg).convert("RGB").save(png, "PNG")
    of_jpeg, of_png = measure(jpeg.getvalue()), measure(png.getvalue())
    for name in ("width", "height", "brightness", "sharpness", "picture"):
        np.testing.assert_array_equal(getattr(of_jpeg, name), getattr(of_png, name))
