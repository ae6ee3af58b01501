"""Quantization to int8: the record, refusals, real photographs."""

import csv
import io
import json
import zipfile

import openvino
import pyarrow.parquet
import pytest
import torch
from PIL import Image

import hf_vit
from hf_vit.runtimes.quantization import quantize

from ..tiny_models import OUTLIERS, write_images


def test_the_record_describes_the_quantization(quantized):
    record = json.loads((quantized / "quantization.json").read_text())
    assert (quantized / "calibration.json").is_file()  # for the card
    assert record["in_float32"] == [OUTLIERS]
    assert (record["calibration"]["images"], record["held_out"]["images"]) == (12, 4)
    assert record["top1"].keys() == {"images", "int8", "float32"}
    nodes = openvino.Core().read_model(quantized / "program.xml").get_ops()
    # inputs of q, k, v together, of o, fc1 and fc2 of three layers
    assert sum(node.get_type_name() == "FakeQuantize" for node in nodes) >= 3 * 4
    # weights: layers, patches, head, without the outliers'
    assert sum(node.get_element_type() == openvino.Type.i8 for node in nodes) == 3 * 6 + 2 - 1


@pytest.mark.parametrize(("case", "named"), [("few", " 15 "), ("damaged", "07.png"), ("bad share", "1.5")])
def test_errors_of_quantize_are_one_sentence_and_leave_no_output(case, named, quantized, tmp_path, run_command):
    images = write_images(tmp_path / "images", 15 if case == "few" else 16)
    if case == "damaged":
        (images / "07.png").write_bytes(b"\x89PNG\r\n\x1a\nno more")
    before = sorted(tmp_path.rglob("*"))
    command = ["quantize", quantized.parent / "float", tmp_path / "out", "--calibrate", images]
    error = run_command([*command, "--min-agreement", 1.5 if case == "bad share" else 0], status=2)
    assert named in error
    assert error.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.slow
def test_too_low_agreement_leaves_no_output(quantized, tmp_path):
    with pytest.raises(ValueError, match=r"101.0%"):
        quantize(quantized.parent / "float", tmp_path / "out", [quantized.parent / "images"], min_agreement=1.01)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_real_model_keeps_its_predictions(tmp_path, shared, run_command):
    """AugReg's Ti/16, calibrated with small photographs of other data, on 104 with ImageNet's own labels."""
    weights = shared / "weights" / "Ti_16-imagenet2012-res_224.npz"
    run_command(["convert", weights, tmp_path / "ti16"])
    rows = pyarrow.parquet.read_table(shared / "data/tiny_imagenet/val_subset.parquet").to_pylist()
    (tmp_path / "images").mkdir()
    for number, row in enumerate(rows[::6]):
        (tmp_path / "images" / f"{number:03}.jpg").write_bytes(row["image"]["bytes"])
    quantize(tmp_path / "ti16", tmp_path / "int8", [tmp_path / "images"], min_agreement=0.9)

    with zipfile.ZipFile(shared / "data/imagenet_sample/images.zip") as archive:
        paths = {name.split("/")[-1]: name for name in archive.namelist()}
        with open(shared / "data/imagenet_sample/labels.csv") as file:
            rows = list(csv.DictReader(file))
        photographs = [Image.open(io.BytesIO(archive.read(paths[row["file_name"]]))) for row in rows]
    labels = torch.tensor([int(row["label"]) for row in rows])
    answers = {}
    for backend in (None, "torch"):
        model, processor = hf_vit.load(tmp_path / "int8", backend=backend)
        pixel_values = processor(photographs, return_tensors="pt")["pixel_values"]
        with torch.inference_mode():
            answers[backend] = torch.cat([model(batch).logits.argmax(dim=1) for batch in pixel_values.split(13)])
    int8, float32 = (answers[backend] == labels for backend in (None, "torch"))
    lost, won = int((float32 & ~int8).sum()), int((int8 & ~float32).sum())
    assert lost - won <= 2 * (lost + won) ** 0.5  # two standard deviations of the sign test; 1 or 2 images here
    assert (answers[None] == answers["torch"]).double().mean() > 0.95
