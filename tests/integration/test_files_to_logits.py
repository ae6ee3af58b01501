"""From the bytes of JPEG files to the original's logits, with a real model; photographs and weights may be absent."""

import io
import json
import tarfile
import zipfile
from itertools import islice

import datasets
import numpy as np
import pytest
import torch
from accelerate import Accelerator

import hf_vit
from hf_vit.cli import main
from hf_vit.conversion import convert, export
from hf_vit.data.sources import load_split
from hf_vit.data.splits import open_split
from hf_vit.inference.predictions import EvaluationBatches
from hf_vit.loading import save_folder
from hf_vit.runtimes.runner import Classifier
from hf_vit.settings.fields import EvaluateSettings


@pytest.fixture(scope="module")
def expected(shared):
    """104 names and, by preset, the logits of the original code, (104, 1000)."""
    file = shared / "goldens" / "bytes.npz"
    if not file.is_file():
        pytest.skip("bytes.npz is not next to the checkout")
    return np.load(file)


@pytest.fixture(scope="module")
def photographs(shared, expected, tmp_path_factory):
    """Paths of the 104 photographs."""
    folder = tmp_path_factory.mktemp("photographs")
    with zipfile.ZipFile(shared / "data/imagenet_sample/images.zip") as archive:
        members = {name.split("/")[-1]: name for name in archive.namelist()}
        for name in expected["names"]:
            (folder / name).write_bytes(archive.read(members[name]))
    return [folder / name for name in expected["names"]]


@pytest.fixture(scope="module")
def ti16(shared, tmp_path_factory):
    folder = tmp_path_factory.mktemp("real") / "ti16"
    convert(shared / "weights/Ti_16-imagenet2012-res_224.npz", preset="vit_jax").save(folder)
    return folder


@pytest.mark.parametrize("preset", ["vit_jax", "augreg"])
def test_logits_equal_the_original(preset, expected, photographs, ti16):
    model, processor = hf_vit.load(ti16, preset=preset)
    assert processor.jpeg_dct == "fast"
    logits = []
    for start in range(0, len(photographs), 26):
        inputs = processor(photographs[start : start + 26], return_tensors="pt")
        with torch.no_grad():
            logits.append(model(**inputs).logits)
    logits = torch.cat(logits).double().numpy()
    np.testing.assert_allclose(logits, expected[preset], rtol=0, atol=1e-4)
    assert (logits.argmax(axis=1) == expected[preset].argmax(axis=1)).all()


# Doors to the 104 files. A command prints probabilities: their logarithms are the logits up to a number for each image.
# Programs may add what they differ from PyTorch on the same tensor.


@pytest.fixture(scope="module")
def shards(photographs, tmp_path_factory):
    """The files as bytes in parquet, and in a tar; both in their order."""
    folder = tmp_path_factory.mktemp("shards")
    contents = [path.read_bytes() for path in photographs]
    rows = {"image": [{"bytes": content, "path": None} for content in contents], "label": [0] * len(contents)}
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["any"])})
    (folder / "parquet").mkdir()
    datasets.Dataset.from_dict(rows, features=features).to_parquet(folder / "parquet" / "test-0.parquet")
    (folder / "tars").mkdir()
    with tarfile.open(folder / "tars" / "test-0.tar", "w", format=tarfile.USTAR_FORMAT) as archive:
        for number, content in enumerate(contents):
            for suffix, data in (("jpg", content), ("cls", b"0")):
                entry = tarfile.TarInfo(f"{number:03}.{suffix}")
                entry.size = len(data)
                archive.addfile(entry, io.BytesIO(data))
    return folder


def of_command(folder, images, names, capsys):
    """Logits by `hf-vit predict`, up to a number that is the same for all classes of an image."""
    capsys.readouterr()
    assert main(["predict", str(folder), *map(str, images), "--top-k", "1000", "--format", "jsonl"]) == 0
    logits = []
    for line in capsys.readouterr().out.splitlines():
        scores = {entry["label"]: entry["score"] for entry in json.loads(line)["predictions"]}
        logits.append(np.log([scores[name] for name in names]))
    return np.array(logits)


def of_split(folder, samples):
    """Logits by the batches of an evaluation."""
    model, processor = hf_vit.load(folder)
    settings = EvaluateSettings(eval_batch_size=26, num_workers=0)
    batches = EvaluationBatches(settings, open_split(samples), processor, model.config, Accelerator(cpu=True))
    logits = []
    with torch.no_grad():
        for batch in islice(batches, 4):
            logits.append(model(batches.on_device(batch)["image"]).logits)
    return torch.cat(logits).double().numpy()


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["vit_jax", "augreg"])
def test_logits_through_every_door(preset, expected, photographs, shards, ti16, tmp_path, capsys):
    folder = tmp_path / "model"
    model, processor = hf_vit.load(ti16, preset=preset)
    save_folder(folder, model, processor)
    names = [model.config.id2label[index] for index in range(1000)]
    found = {
        "command, files": of_command(folder, photographs, names, capsys),
        "command, parquet": of_command(folder, [shards / "parquet" / "test-0.parquet"], names, capsys),
        "evaluation, tar": of_split(folder, load_split(str(shards / "tars"), "test", streaming=True)),
    }
    centered = expected[preset] - expected[preset].mean(axis=1, keepdims=True)
    for door, logits in found.items():
        difference = np.abs(logits - logits.mean(axis=1, keepdims=True) - centered)
        assert difference.max() < 1e-4, door


@pytest.mark.slow
@pytest.mark.parametrize("to", ["onnx", "openvino"])
@pytest.mark.parametrize("preset", ["vit_jax", "augreg"])
def test_logits_of_deployed_folders(preset, to, expected, photographs, ti16, tmp_path):
    pytest.importorskip({"onnx": "onnxruntime"}.get(to, to))
    model, processor = hf_vit.load(ti16, preset=preset)
    export(model, tmp_path / "deployed", to, processor=processor)
    deployed = Classifier(tmp_path / "deployed")
    for path, original in zip(photographs, expected[preset], strict=True):
        with torch.no_grad():
            of_torch = model(**processor(path, return_tensors="pt")).logits[0].numpy()
        logits = deployed.logits(path)
        of_program = np.abs(logits - of_torch).max()
        assert of_program < 1e-4
        assert np.abs(logits - original).max() < 1e-4 + of_program
