"""Image towers of files with two towers: SigLIP, SigLIP 2, CLIPPO, LiT, PaliGemma; judged by the original's outputs."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModel, AutoModelForImageClassification, pipeline

from hf_vit import HfViTModel
from hf_vit.cli import main
from hf_vit.conversion import ConversionError, convert, export
from hf_vit.files.npz import NpzReader
from hf_vit.loading import save_folder

from ..comparing import assert_same_weights, relative_gap
from ..paths import MORE, golden_runs
from ..tiny_models import load_model
from .test_way_back import stored

RUNS = {run["id"]: run for run in golden_runs("siglip", "siglip2", "clippo", "lit", "paligemma", folder=MORE)}
POOLING = {"map": "map", "tok": "cls", "cls": "cls", "none": "none"}
# by key of the goldens, field of the outputs
OUTPUTS = {"encoded": "last_hidden_state", "pre_logits": "pooler_output", "image_embeds": "image_embeds"}


def gaps(model, expected, suffix):
    """Largest differences over the largest values, for the outputs that a golden has in this precision."""
    pixel_values = torch.from_numpy(expected["images"]).permute(0, 3, 1, 2).to(model.dtype)
    with torch.no_grad():
        outputs = model(pixel_values, output_hidden_states=True)
    keys = {f"{key}{suffix}": field for key, field in OUTPUTS.items()} | {f"pooled{suffix}": "pooler_output"}
    return {key: relative_gap(outputs[field], expected[key]) for key, field in keys.items() if key in expected}


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_a_tower_equals_the_original(run):
    model, processor = convert(MORE / run["checkpoint"])
    config = model.config
    assert type(model) is HfViTModel
    assert (config.pooling, config.projection_dim) == (POOLING[run["pool"]], run["head"])
    assert processor.preset == "lit"
    assert len(model.conversion_record["other_parts"]) in (1, 2, 3)
    with np.load(MORE / run["expected"]) as expected:
        single = gaps(model, expected, "")
        double = gaps(model.double(), expected, "_f64")
    assert max(single.values()) <= 2e-5, single
    assert max(double.values()) <= 1e-9, double
    assert ("image_embeds_f64" in double) == (run["head"] is not None)


def test_other_parts_of_a_file_are_reported(tmp_path, run_command):
    assert "b, t, txt" in run_command(["convert", MORE / "siglip2.npz", tmp_path / "folder"])
    record = convert(MORE / "siglip2.npz")[0].conversion_record
    with np.load(MORE / "siglip2.npz") as arrays:
        assert record["similarity"] == {"t": float(arrays["params/t"][0]), "b": float(arrays["params/b"][0])}
    assert convert(MORE / "paligemma.npz")[0].conversion_record["other_parts"] == ["llm"]
    assert convert(MORE / "lit_bert.npz")[0].conversion_record["other_parts"] == ["t", "txt"]


@pytest.mark.parametrize("checkpoint", ["clippo", "paligemma_bf16"])
def test_a_folder_of_a_tower_in_transformers(tmp_path, checkpoint):
    """Streamed conversion, Auto class and pipeline; judged by the original's `image_embeds`."""
    assert convert(MORE / f"{checkpoint}.npz", read_weights=False).save(tmp_path / "folder").model.device.type == "meta"
    with np.load(MORE / f"{checkpoint}.expected.npz") as expected:
        model = AutoModel.from_pretrained(tmp_path / "folder")
        assert gaps(model, expected, "")["image_embeds"] <= 2e-5
    extract = pipeline("image-feature-extraction", model=str(tmp_path / "folder"))
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 50, 3), np.uint8))
    features = torch.tensor(extract(image))
    with torch.no_grad():
        inputs = extract.image_processor(image, return_tensors="pt")
        torch.testing.assert_close(features, model(**inputs).last_hidden_state, rtol=0, atol=1e-6)


def test_a_program_returns_the_embedding(tmp_path):
    model, _ = convert(MORE / "clippo.npz")
    export(model, tmp_path / "model.pt2", "torch-export")
    with np.load(MORE / "clippo.expected.npz") as expected, torch.no_grad():
        program = torch.export.load(tmp_path / "model.pt2").module()
        image_embeds = program(torch.from_numpy(expected["images"]).permute(0, 3, 1, 2))
        assert relative_gap(image_embeds, expected["image_embeds"]) <= 2e-5


def test_a_projection_is_not_a_classifier(tmp_path):
    model, processor = convert(MORE / "lit_bert.npz")
    save_folder(tmp_path / "folder", model, processor)
    assert "LABEL_0" not in (tmp_path / "folder" / "config.json").read_text()
    for to in ("timm", "transformers"):
        with pytest.raises(ConversionError, match="projection_dim"):
            export(model, tmp_path / "out", to)
    classifier = AutoModelForImageClassification.from_pretrained(tmp_path / "folder", num_labels=5)
    assert not classifier.classifier.weight.any()
    classifier.save_pretrained(tmp_path / "classifier")
    assert load_model(tmp_path / "classifier").vit.projection is None
    assert HfViTModel.from_pretrained(tmp_path / "classifier").layernorm.weight.equal(model.layernorm.weight)


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_a_file_with_two_towers_is_restored(tmp_path, run):
    """By the commands, from file to file: every array of both towers, in its order."""
    original = MORE / run["checkpoint"]
    assert main(["convert", str(original), str(tmp_path / "folder")]) == 0
    back = ["export", str(tmp_path / "folder"), str(tmp_path / "back.npz"), "--to", "jax", "--original", str(original)]
    assert main(back) == 0
    written, listed = stored(tmp_path / "back.npz"), json.loads((MORE / "arrays.json").read_text())[run["checkpoint"]]
    assert written == stored(original)
    assert len(written) == len(listed) == run["arrays"]
    assert {name for name, *_ in written} == set(listed)


def test_a_trained_tower_is_written_into_its_file(tmp_path):
    model, processor = convert(MORE / "paligemma_bf16.npz")
    with torch.no_grad():
        model.layers[1].mlp.fc1.weight.mul_(2)
    save_folder(tmp_path / "folder", model, processor)
    export(load_model(tmp_path / "folder"), tmp_path / "back.npz", "jax", original=MORE / "paligemma_bf16.npz")
    kernel = "params/img/Transformer/encoderblock/MlpBlock_0/Dense_0/kernel"
    for ours, theirs in zip(stored(tmp_path / "back.npz"), stored(MORE / "paligemma_bf16.npz"), strict=True):
        assert ours[:3] == theirs[:3]
        assert (ours == theirs) == (ours[0] != kernel)
    with NpzReader(tmp_path / "back.npz") as back, NpzReader(MORE / "paligemma_bf16.npz") as original:
        assert back.read(kernel)[0].equal(original.read(kernel)[0])
        assert back.read(kernel)[1].equal(2 * original.read(kernel)[1])


def test_the_original_must_be_the_models_own_file(tmp_path):
    model, _ = convert(MORE / "paligemma.npz")
    out = tmp_path / "back.npz"
    with pytest.raises(ConversionError, match=r"paligemma2.npz"):
        export(model, out, "jax", original=MORE / "paligemma2.npz")
    model.conversion_record = None
    with pytest.raises(ConversionError, match="siglip"):
        export(model, out, "jax", original=MORE / "siglip.npz")
    with torch.no_grad():
        model.projection.bias[0] = 1e5
    with pytest.raises(ConversionError, match="img/head/bias"):
        export(model, out, "jax", original=MORE / "paligemma_f16.npz")
    with pytest.raises(ConversionError, match="original"):
        export(model, out, "jax", dialect="flax", original=MORE / "paligemma.npz")
    assert not list(tmp_path.iterdir())


def test_resampled_positions_are_written(tmp_path):
    model, _ = convert(MORE / "lit_big_vision.npz", image_size=(48, 24))
    export(model, tmp_path / "back.npz", "jax", original=MORE / "lit_big_vision.npz")
    again, _ = convert(tmp_path / "back.npz", position_grid=(6, 3))
    assert_same_weights(again, model)


def test_a_projection_written_as_a_head_gives_a_warning(tmp_path, caplog):
    model, _ = convert(MORE / "lit_bert.npz")
    export(model, tmp_path / "head.npz", "jax")
    assert "48" in caplog.text
    again, _ = convert(tmp_path / "head.npz")
    assert again.config.num_labels == 48
    assert again.classifier.weight.equal(model.projection.weight)
