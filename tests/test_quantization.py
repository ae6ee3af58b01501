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
from hf_vit.cli import main
from hf_vit.quantization import quantize

from .paths import SHARED
from .tiny_models import OUTLIERS, write_images


def test_the_record_describes_the_quantization(quantized):
    made = quantized
    record = json.loads((made / "quantization.json").read_text())
    assert (made / "calibration.json").is_file()  # for the card
    assert record["in_float32"] == [OUTLIERS]
    assert (record["calibration"]["images"], record["held_out"]["images"]) == (12, 4)
    assert record["top1"].keys() == {"images", "int8", "float32"}
    types = [node.get_type_name() for node in openvino.Core().read_model(made / "program.xml").get_ops()]
    stored = [node.get_element_type() for node in openvino.Core().read_model(made / "program.xml").get_ops()]
    assert types.count("FakeQuantize") >= 3 * 4  # inputs of q, k, v together, of o, fc1 and fc2 of three layers
    assert stored.count(openvino.Type.i8) == 3 * 6 + 2 - 1  # weights: layers, patches, head, without the outliers'


@pytest.mark.parametrize(
    ("case", "sentence"),
    [
        ("few", " 15 "),
        ("damaged", "07.png"),
        ("bad share", "1.5"),
    ],
)
def test_errors_of_quantize_are_one_sentence_and_leave_no_output(case, sentence, quantized, tmp_path, run_command):
    calibration = write_images(tmp_path / "images", 15 if case == "few" else 16)
    if case == "damaged":
        (calibration / "07.png").write_bytes(b"\x89PNG\r\n\x1a\nno more")
    more = ["--min-agreement", "1.5"] if case == "bad share" else []
    before = sorted(tmp_path.rglob("*"))
    error = run_command(
        ["quantize", str(quantized.parent / "float"), str(tmp_path / "out"), "--calibrate", str(calibration), *more],
        status=2,
    ).strip()
    assert sentence in error
    assert "\n" not in error
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.slow
def test_too_low_agreement_leaves_no_output(quantized, tmp_path):
    with pytest.raises(ValueError, match=r"101.0%"):
        quantize(quantized.parent / "float", tmp_path / "out", [quantized.parent / "images"], min_agreement=1.01)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.skipif(not (SHARED / "weights").is_dir(), reason="needs real weights and photographs in shared/")
def test_a_real_model_keeps_its_predictions(tmp_path):
    """AugReg's Ti/16, calibrated with small photographs of other data, on 104 with ImageNet's own labels."""
    weights = SHARED / "weights" / "Ti_16-imagenet2012-res_224.npz"
    assert main(["convert", str(weights), str(tmp_path / "ti16")]) == 0
    rows = pyarrow.parquet.read_table(SHARED / "data/tiny_imagenet/val_subset.parquet").to_pylist()
    (tmp_path / "images").mkdir()
    for number, row in enumerate(rows[::6]):
        (tmp_path / "images" / f"{number:03}.jpg").write_bytes(row["image"]["bytes"])
    quantize(tmp_path / "ti16", tmp_path / "int8", [tmp_path / "images"], min_agreement=0.9)

    with zipfile.ZipFile(SHARED / "data/imagenet_sample/images.zip") as archive:
        paths = {name.split("/")[-1]: name for name in archive.namelist()}
        with open(SHARED / "data/imagenet_sample/labels.csv") as file:
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
