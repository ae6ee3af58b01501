"""Folders and files that version 0.1.0 wrote (make.py) mean the same to today's code: one row for each kind."""

import json
import runpy
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import load_dataset
from PIL import Image
from safetensors.torch import load_file, save_file

import hf_vit
from hf_vit.cli import main
from hf_vit.conversion import convert, export
from hf_vit.data.splits import open_named
from hf_vit.files.reading import read_json_object
from hf_vit.models.image_processing_hf_vit import PRESETS, HfViTImageProcessor
from hf_vit.settings.fields import FinetuneSettings

from ..commands import evaluate, pretrain
from ..comparing import change_json
from ..tiny_models import tiny

HERE = Path(__file__).parent
EXPECTED = np.load(HERE / "expected.npz")
MODELS = ["converted", "saved", "run", "run/best", "calibrated", "lora", "adapter"]


@pytest.fixture
def old(tmp_path) -> Path:
    """A copy of the folders, so that nothing is written beside the originals."""
    ignored = shutil.ignore_patterns("make.py", "test_*.py", "__init__.py", "__pycache__")
    return shutil.copytree(HERE, tmp_path / "old", ignore=ignored)


def logits_of(folder: Path) -> np.ndarray:
    model, _ = hf_vit.load(folder)
    height, width = np.broadcast_to(model.config.image_size, 2)
    pixel_values = torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return model(pixel_values).logits.numpy()


@pytest.mark.parametrize("name", MODELS)
def test_models_load_with_the_same_logits(name, old, monkeypatch):
    monkeypatch.chdir(old)  # the adapter names its base by a relative path
    np.testing.assert_allclose(logits_of(old / name), EXPECTED[name.replace("/", "_")], rtol=0, atol=1e-5)


def test_a_quantized_folder_computes_as_it_did(old):
    """Other processors round sums of int8 products in another order."""
    pytest.importorskip("openvino", reason="openvino (extra openvino) is not installed")
    expected = EXPECTED["quantized"]
    np.testing.assert_allclose(logits_of(old / "quantized"), expected, rtol=0, atol=0.05 * np.abs(expected).max())


@pytest.mark.slow
def test_a_folder_for_browsers_is_replaced(old, web_runtime):
    """Its marker says that its files are ours."""
    pytest.importorskip("onnxscript", reason="the extra export is not installed")
    line = ["export", str(old / "saved"), str(old / "web"), "--to", "web", "--runtime", str(web_runtime)]
    before = (old / "web" / "onnx" / "model.onnx").read_bytes()
    assert main(line) == 2
    assert (old / "web" / "onnx" / "model.onnx").read_bytes() == before
    assert main([*line, "--overwrite"]) == 0
    assert (old / "web" / "onnx" / "model.onnx").read_bytes() != before


def test_issues_of_an_audit_leave_images_out(old):
    issues = old / "audited" / "issues.csv"
    listed = {line.split(",")[0] for line in issues.read_text().splitlines()[1:]}
    settings = FinetuneSettings(dataset=str(old / "images"), exclude=str(issues))
    assert len(listed) >= 3
    assert len(open_named(settings, "train")) == 24 - len(listed)


@pytest.mark.usefixtures("fresh_accelerator")
def test_an_evaluation_into_its_folder_has_the_same_scores(old, monkeypatch):
    """With the features that are kept there, or new ones."""
    monkeypatch.chdir(old)
    before = json.loads((old / "evaluated" / "knn.json").read_text())
    line = ["--model", "saved", "--dataset", "images", "--num-workers", "0", "--train-split", "train"]
    line += ["--split", "train", "--protocol", "knn", "--output-dir", "evaluated"]
    assert evaluate(line)["knn"] == before["knn"]


def test_the_position_that_a_class_token_of_big_vision_had_is_added_to_it(goldens, tmp_path):
    """Its config.json has no `no_embed_class`; its checkpoints are those of other parameters."""
    convert(goldens / "bv_tok.npz", read_weights=False).save(tmp_path / "new")
    expected = logits_of(tmp_path / "new")
    shutil.copytree(tmp_path / "new", tmp_path / "old")
    (tmp_path / "old" / "manifest.json").unlink()
    settings = read_json_object(tmp_path / "old" / "config.json")
    del settings["no_embed_class"]
    (tmp_path / "old" / "config.json").write_text(json.dumps(settings))
    weights = load_file(tmp_path / "old" / "model.safetensors")
    name = "vit.embeddings.position_embeddings"
    row = torch.ones(1, 1, weights[name].shape[2])  # after training
    weights["vit.embeddings.cls_token"] -= row
    weights[name] = torch.cat([row, weights[name]], dim=1)
    save_file(weights, tmp_path / "old" / "model.safetensors", metadata={"format": "pt"})
    np.testing.assert_allclose(logits_of(tmp_path / "old"), expected, rtol=0, atol=1e-5)
    model, _ = hf_vit.load(tmp_path / "old")
    assert model.config.no_embed_class
    export(model, tmp_path / "back.npz", "jax")
    assert "pos_embedding" in np.load(tmp_path / "back.npz")


@pytest.mark.parametrize("name", ["converted", "run", "run/best", "lora"])
def test_manifests_are_verified(name, old):
    assert (old / name / "manifest.json").exists()
    assert main(["verify", str(old / name)]) == 0


def test_a_converted_folder_goes_back_to_its_source(old, tmp_path):
    """By conversion.json: names, layout and what was not converted."""
    assert main(["export", str(old / "converted"), str(tmp_path / "back.safetensors"), "--to", "timm"]) == 0
    source = load_file(HERE.parent / "goldens_peers" / "timm_plain.safetensors")
    source = {name: array.float() for name, array in source.items()}  # it is stored in float16
    torch.testing.assert_close(load_file(tmp_path / "back.safetensors"), source, rtol=0, atol=0)


def test_a_dropped_head_of_an_old_record_is_exported(tmp_path):
    """Its conversion.json says left_out, today's dropped."""
    target = tmp_path / "model.npz"
    source = tiny(image_size=24, patch_size=4)
    torch.nn.init.zeros_(source.classifier.weight)
    torch.nn.init.constant_(source.classifier.bias, -10)
    export(source, target, "jax")
    convert(target, read_weights=False).save(tmp_path / "folder")
    file = tmp_path / "folder" / "conversion.json"
    record = json.loads(file.read_text())
    record["left_out"] = record.pop("dropped")
    record["beside"] = record.pop("other_parts")
    (tmp_path / "folder" / "manifest.json").unlink()
    file.write_text(json.dumps(record))
    model, _ = hf_vit.load(tmp_path / "folder")
    export(model, tmp_path / "again.npz", "jax")
    assert record["left_out"]
    assert np.load(tmp_path / "again.npz")["head/kernel"].shape == np.load(target)["head/kernel"].shape


def test_an_old_run_may_not_be_deleted(old):
    """Its marker does not list the files that it wrote; they are named."""
    recipe = shutil.copy(old / "run" / "recipe.yaml", old / "recipe.yaml")
    with pytest.raises(FileExistsError, match=r"config\.json"):
        pretrain(["--recipe", str(recipe), "--output_dir", str(old / "run"), "--overwrite", "true"])
    assert (old / "run" / "recipe.yaml").exists()


def test_a_run_resumes_to_the_same_weights(old):
    """The checkpoint is of step 3; the weights are those of the run that was not interrupted."""
    expected = load_file(old / "run" / "model.safetensors")
    (old / "run" / "model.safetensors").unlink()
    recipe = old / "run" / "recipe.yaml"
    pretrain(["--recipe", str(recipe), "--output_dir", str(old / "run"), "--resume", "true"])
    history = json.loads((old / "run" / "checkpoints" / "step_00000005" / "state.json").read_text())["history"]
    assert sorted({entry["step"] for entry in history})[-1] == 5
    torch.testing.assert_close(load_file(old / "run" / "model.safetensors"), expected, rtol=0, atol=1e-5)
    assert read_json_object(old / "run" / "preprocessor_config.json")["jpeg_dct"] == "accurate"  # as before the stop


# Changes of an old folder -> how its JPEGs are decoded: (folder, preset, changes of conversion.json or None to delete
# it, a further file) -> jpeg_dct
FAST_PRESETS = [name for name, preset in PRESETS.items() if preset.jpeg_dct == "fast"]
DECODERS = [
    ("saved", "vit_jax", None, None, "accurate"),
    ("run", "vit_jax", None, None, "accurate"),
    ("run/best", "vit_jax", None, None, "accurate"),
    ("lora", "vit_jax", None, None, "accurate"),
    ("calibrated", "vit_jax", None, None, "accurate"),
    *[("converted", preset, {}, None, "fast") for preset in FAST_PRESETS],
    ("converted", "timm", {}, None, "accurate"),
    ("converted", "transformers", {}, None, "accurate"),
    ("converted", "native", {"names": "big_vision"}, None, "fast"),
    ("converted", "native", {"names": "transformers"}, None, "accurate"),
    ("converted", "vit_jax", None, None, "accurate"),
    ("converted", "vit_jax", {}, "calibration.json", "accurate"),  # written by `calibrate`
    ("converted", "vit_jax", {}, "card_data.json", "accurate"),  # written by training
    ("converted", "native", {"names": "big_vision"}, "recipe.yaml", "accurate"),
]


@pytest.mark.parametrize(("name", "preset", "dialect", "file", "expected"), DECODERS)
def test_how_jpegs_of_old_folders_are_decoded(name, preset, dialect, file, expected, old):
    """What was trained or calibrated with Pillow's decoder keeps it; weights of the original get the original's."""
    folder = old / name
    (folder / "manifest.json").unlink(missing_ok=True)
    change_json(folder / "preprocessor_config.json", preset=preset)
    record = folder / "conversion.json"
    if dialect is None:
        record.unlink(missing_ok=True)
    else:
        change_json(record, dialect=read_json_object(record)["dialect"] | dialect)
    if file is not None:
        (folder / file).write_text("{}")
    for processor in (
        hf_vit.load(folder)[1],
        HfViTImageProcessor.from_pretrained(folder),
        HfViTImageProcessor.from_pretrained(folder / "preprocessor_config.json"),
    ):
        assert processor.jpeg_dct == expected
        assert processor.preset == preset
    processor.save_pretrained(old / "again")  # what is stated is kept
    assert HfViTImageProcessor.from_pretrained(old / "again").jpeg_dct == expected


def test_a_calibrated_folder_predicts_sets(old, capsys):
    line = ["predict", str(old / "calibrated"), str(old / "images"), "--coverage", "0.95", "--format", "jsonl"]
    assert main(line) == 0
    assert len(capsys.readouterr().out.splitlines()) == 24


@pytest.mark.parametrize("suffix", ["npz", "parquet"])
def test_features_are_searched(suffix, old, tmp_path, capsys):
    """An image is most similar to itself, by features of the same model."""
    features = old / f"features.{suffix}"
    query = str(old / "images" / "cat" / "3.png")
    assert main(["search", str(features), query, "--model", str(old / "saved"), "--top-k", "1", "--json"]) == 0
    found = capsys.readouterr().out.replace(query, "")
    assert "cat/3.png" in found


def test_queries_are_decoded_as_the_images_of_old_features(old, tmp_path, capsys):
    """The features do not state the decoder: they were made with Pillow's, and the folder now decodes as TensorFlow."""
    change_json(old / "converted" / "preprocessor_config.json", preset="vit_jax")
    (old / "converted" / "manifest.json").unlink()
    photograph = tmp_path / "noise.jpg"
    noise = np.random.default_rng(0).integers(0, 256, (40, 72, 3), np.uint8)
    Image.fromarray(noise).save(photograph)
    image, features = str(photograph), str(tmp_path / "features.npz")
    assert main(["embed", str(old / "converted"), image, "--output", features]) == 0
    stored = dict(np.load(features))
    about = json.loads(str(stored.pop("about")))
    assert about.pop("jpeg_dct") == "fast"
    model, processor = hf_vit.load(old / "converted")
    vectors = {}
    for jpeg_dct in ("fast", "accurate"):
        inputs = processor(image, jpeg_dct=jpeg_dct, return_tensors="pt")
        with torch.no_grad():
            vectors[jpeg_dct] = model.base_model(**inputs).pooler_output.numpy()
    np.testing.assert_allclose(stored["features"], vectors["fast"], rtol=0, atol=1e-5)
    assert np.abs(vectors["fast"] - vectors["accurate"]).max() > 1e-3
    stored["features"] = vectors["accurate"]
    np.savez(features, **stored, about=json.dumps(about))
    capsys.readouterr()
    assert main(["search", features, image, "--model", str(old / "converted"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["similarity"] == pytest.approx(1, abs=2e-7)


@pytest.mark.slow  # it starts processes
def test_shards_are_read_with_their_index(old):
    """The images of the tar files are those of the folder."""
    assert main(["shard", str(old / "shards"), str(old / "again"), "--images", "9"]) == 0
    files = {"train": str(old / "again" / "*.tar")}
    rows = load_dataset("webdataset", data_files=files, split="train", cache_dir=old / "cache")
    assert len(rows) == 24


def test_a_deployed_folder_predicts(old, capsys, monkeypatch):
    """Its own predict.py, as its user starts it."""
    monkeypatch.setattr(sys, "argv", ["predict.py", str(old / "images" / "cat" / "3.png")])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(old / "deployed" / "predict.py"), run_name="__main__")
    assert not end.value.code
    assert "LABEL_" in capsys.readouterr().out
