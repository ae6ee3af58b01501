"""int8: outputs compared with the saved program in OpenVINO, without this package; real photographs."""

import csv
import io
import json
import shutil
import zipfile

import numpy as np
import openvino
import pyarrow.parquet
import pytest
import torch
from PIL import Image
from torch import nn
from transformers import pipeline

import hf_vit
from hf_vit import HfViTForImageClassification
from hf_vit.backends.quantization import quantize
from hf_vit.cli import main

from ..paths import SHARED
from ..tiny_models import images, save_tiny, tiny

OUTLIERS = "vit.layers.1.mlp.fc2"  # the only layer whose inputs are made to have them
PROGRAM = ("program.xml", "program.bin")


def write_images(folder, count=16):
    folder.mkdir(parents=True)
    generator = np.random.default_rng(0)
    for number in range(count):
        Image.fromarray(generator.integers(0, 255, (24, 40, 3), np.uint8)).save(folder / f"{number:02}.png")
    return folder


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A folder with a classifier, one of whose 1500 hidden units is 60 everywhere, and images."""
    folder = save_tiny(tmp_path_factory.mktemp("int8") / "float", intermediate_size=1500)
    model = HfViTForImageClassification.from_pretrained(folder)
    with torch.no_grad():
        model.get_submodule(OUTLIERS.replace("fc2", "fc1")).bias[0] = 60
    model.save_pretrained(folder)
    write_images(folder.parent / "images" / "LABEL_3")
    return folder


@pytest.fixture(scope="module")
def made(source):
    """The quantised folder."""
    output = source.parent / "int8"
    quantize(source, output, [source.parent / "images"], min_agreement=0)
    return output


def of_program(folder, pixel_values):
    """Return the logits of the saved files in OpenVINO, without this package."""
    core = openvino.Core()
    settings = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": torch.get_num_threads()}
    return torch.from_numpy(core.compile_model(core.read_model(folder / PROGRAM[0]), "CPU", settings)(pixel_values)[0])


def test_a_quantised_model_computes_with_its_program(source, made):
    model, _ = hf_vit.load(made)
    plain = HfViTForImageClassification.from_pretrained(source).eval()
    pixel_values = images(model, 3)
    with torch.inference_mode():
        outputs = model(pixel_values, labels=torch.tensor([1, 2, 3]))
        expected = plain(pixel_values, labels=torch.tensor([1, 2, 3]))
        judged = of_program(made, pixel_values.numpy())
    assert type(outputs) is type(expected)
    torch.testing.assert_close(outputs.logits, judged)
    torch.testing.assert_close(outputs.loss, nn.functional.cross_entropy(judged, torch.tensor([1, 2, 3])))
    difference = (outputs.logits - expected.logits).abs().max()
    assert 0 < difference < 0.1 * expected.logits.abs().max()


def test_the_record_describes_the_quantisation(made):
    record = json.loads((made / "quantization.json").read_text())
    assert record["in_float32"] == [OUTLIERS]
    assert (record["calibration"]["images"], record["held_out"]["images"]) == (12, 4)
    assert record["top1"].keys() == {"images", "int8", "float32"}
    types = [node.get_type_name() for node in openvino.Core().read_model(made / PROGRAM[0]).get_ops()]
    stored = [node.get_element_type() for node in openvino.Core().read_model(made / PROGRAM[0]).get_ops()]
    assert types.count("FakeQuantize") >= 3 * 4  # inputs of q, k, v together, of o, fc1 and fc2 of three layers
    assert stored.count(openvino.Type.i8) == 3 * 6 + 2 - 1  # weights: layers, patches, head, without the outliers'


def test_unsupported_forwards_run_in_float32_with_a_warning(made, caplog):
    model, _ = hf_vit.load(made)
    plain = HfViTForImageClassification.from_pretrained(made).eval()
    pixel_values = images(model)
    with torch.inference_mode():
        for _ in range(2):
            found = model(pixel_values, output_hidden_states=True)
        expected = plain(pixel_values, output_hidden_states=True)
        torch.testing.assert_close(found.hidden_states, expected.hidden_states)
    with torch.no_grad():
        model.classifier.weight.mul_(2)
        plain.classifier.weight.mul_(2)
    with torch.inference_mode():
        torch.testing.assert_close(model(pixel_values).logits, plain(pixel_values).logits)
    said = [record.getMessage() for record in caplog.records if "int8" in record.getMessage()]
    assert len(said) == 3
    assert "holds an int8 program, which from_pretrained does not use" in said[0]  # of the plain one, and pipelines
    assert "output_hidden_states" in said[1]
    assert "changed since it was quantised" in said[2]


def test_predict_and_pipeline_use_the_quantised_program(made, source, capsys):
    photograph = str(source.parent / "images" / "LABEL_3" / "00.png")
    model, processor = hf_vit.load(made)
    judged = of_program(made, processor([photograph], return_tensors="pt")["pixel_values"].numpy()).softmax(-1)
    assert main(["predict", str(made), photograph, "--top-k", "1", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)["predictions"][0]
    (piped,) = pipeline("image-classification", model=model, image_processor=processor)(photograph, top_k=1)
    for found in (printed, piped):
        assert found["score"] == pytest.approx(judged.max().item(), abs=1e-5)
        assert found["label"] == f"LABEL_{judged.argmax()}"


def damage_program(folder):
    (folder / PROGRAM[1]).write_bytes((folder / PROGRAM[1]).read_bytes()[:-1])


def take_program_away(folder):
    (folder / PROGRAM[0]).unlink()


def write_other_weights(folder):
    tiny(seed=1, intermediate_size=1500).save_pretrained(folder)


def write_other_settings(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"layer_norm_eps": 1e-3}))


def write_other_record(folder):
    (folder / "quantization.json").write_text('{"format": "of another package"}')


@pytest.mark.parametrize(
    ("harm", "sentence"),
    [
        (damage_program, "program.bin is damaged or of another folder"),
        (take_program_away, "no program.xml"),
        (write_other_weights, "int8 program of another model"),
        (write_other_settings, "int8 program of another model"),
        (write_other_record, "is not a record of hf-vit quantize"),
    ],
)
def test_a_damaged_or_foreign_program_is_refused(made, tmp_path, harm, sentence):
    folder = shutil.copytree(made, tmp_path / "copy")
    harm(folder)
    with pytest.raises(ValueError, match=sentence):
        hf_vit.load(folder)


@pytest.mark.parametrize(
    ("case", "sentence"),
    [
        ("few", "cannot calibrate with 15 images (expected at least 16"),
        ("damaged", "07.png"),
        ("nowhere", "no such file or folder"),
        ("no processor", "has no image processor"),
        ("bad share", "--min-agreement is 1.5"),
    ],
)
def test_errors_of_quantize_are_one_sentence_and_leave_no_output(case, sentence, source, tmp_path, capsys):
    folder = shutil.copytree(source, tmp_path / "float")
    calibration = write_images(tmp_path / "images", 15 if case == "few" else 16)
    if case == "damaged":
        (calibration / "07.png").write_bytes(b"\x89PNG\r\n\x1a\nno more")
    if case == "no processor":
        (folder / "preprocessor_config.json").unlink()
    place = tmp_path / "nowhere" if case == "nowhere" else calibration
    more = ["--min-agreement", "1.5"] if case == "bad share" else []
    before = sorted(tmp_path.rglob("*"))
    assert main(["quantize", str(folder), str(tmp_path / "out"), "--calibrate", str(place), *more]) == 2
    error = capsys.readouterr().err.strip()
    assert sentence in error
    assert "\n" not in error
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.slow
def test_too_low_agreement_leaves_no_output(source, tmp_path):
    with pytest.raises(ValueError, match=r"of 4 predictions agree with float32 \(expected 101.0%\)"):
        quantize(source, tmp_path / "out", [source.parent / "images"], min_agreement=1.01)
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
        places = {name.split("/")[-1]: name for name in archive.namelist()}
        with open(SHARED / "data/imagenet_sample/labels.csv") as file:
            rows = list(csv.DictReader(file))
        photographs = [Image.open(io.BytesIO(archive.read(places[row["file_name"]]))) for row in rows]
    labels = torch.tensor([int(row["label"]) for row in rows])
    answers = {}
    for backend in (None, "torch"):
        model, processor = hf_vit.load(tmp_path / "int8", backend=backend)
        pixel_values = processor(photographs, return_tensors="pt")["pixel_values"]
        with torch.inference_mode():
            answers[backend] = torch.cat([model(batch).logits.argmax(dim=1) for batch in pixel_values.split(13)])
    right = {backend: (found == labels).double().mean() for backend, found in answers.items()}
    assert right[None] >= right["torch"] - 0.005
    assert (answers[None] == answers["torch"]).double().mean() > 0.95
