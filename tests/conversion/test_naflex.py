"""SigLIP 2 NaFlex: images of several aspect ratios in one batch; the original code's outputs and pixels judge."""

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import pipeline

from hf_vit.conversion import ConversionError, convert, export
from hf_vit.loading import save_folder

from ..comparing import read_arrays, relative_gap
from ..paths import MORE, golden_runs
from ..tiny_models import load_model
from .test_way_back import stored

(RUN,) = golden_runs("naflex", folder=MORE)
ORIGINAL = MORE / RUN["checkpoint"]


@pytest.fixture(scope="module")
def expected():
    return read_arrays(MORE / RUN["expected"])


def run(model, expected, **changes):
    batch = {name: expected[name] for name in ("pixel_values", "pixel_attention_mask", "spatial_shapes")} | changes
    with torch.no_grad():
        return model(**{name: torch.tensor(array) for name, array in batch.items() if array is not None})


@pytest.mark.parametrize(("dtype", "suffix", "tolerance"), [(torch.float32, "", 2e-5), (torch.float64, "_f64", 1e-9)])
def test_a_batch_of_several_aspect_ratios(expected, dtype, suffix, tolerance):
    model, _ = convert(ORIGINAL)
    assert (model.config.patch_size, model.config.grid_size, model.config.pooling) == (4, (4, 4), "map")
    stages = {}
    model.embeddings.register_forward_hook(lambda module, inputs, output: stages.update(with_posemb=output))
    outputs = run(model.to(dtype), expected)
    is_patch = expected["pixel_attention_mask"].astype(bool)
    stages["encoded"] = outputs.last_hidden_state
    gaps = {name: relative_gap(ours[is_patch], expected[name + suffix][is_patch]) for name, ours in stages.items()}
    gaps["pooled"] = relative_gap(outputs.pooler_output, expected[f"pooled{suffix}"])
    assert max(gaps.values()) <= tolerance, gaps


def test_padding_has_no_influence(expected):
    model, _ = convert(ORIGINAL)
    pooled = run(model, expected).pooler_output
    is_patch = expected["pixel_attention_mask"][..., None].astype(bool)
    other = np.where(is_patch, expected["pixel_values"], 7).astype(np.float32)
    assert run(model, expected, pixel_values=other).pooler_output.equal(pooled)
    assert run(model, expected, pixel_attention_mask=None).pooler_output.equal(pooled)
    for index in range(len(pooled)):
        image = torch.from_numpy(expected[f"image_{index}"]).permute(2, 0, 1)[None]
        with torch.no_grad():
            assert relative_gap(model(image).pooler_output, expected["pooled"][index : index + 1]) <= 2e-5


def test_the_processor_finds_the_grids_and_pixels_of_the_original():
    with np.load(MORE / "naflex_preprocess.npz") as arrays:
        _, processor = convert(ORIGINAL)
        assert (processor.preset, processor.max_num_patches) == ("native", 16)
        patch_size, limit = int(arrays["patch_size"]), int(arrays["max_num_patches"])
        for index in range(5):
            batch = processor(Image.fromarray(arrays[f"image{index}"]), max_num_patches=limit, return_tensors="pt")
            grid = arrays[f"grid{index}"].tolist()
            assert batch.spatial_shapes.tolist() == [grid]
            assert batch.pixel_values.shape == (1, limit, 3 * patch_size**2)
            resized = arrays[f"resized{index}"].reshape(grid[0], patch_size, grid[1], patch_size, 3)
            theirs = resized.transpose(0, 2, 1, 3, 4).reshape(grid[0] * grid[1], -1)
            ours = batch.pixel_values[0, : len(theirs)].numpy()
            assert np.abs(ours - theirs).max() <= 2 / 255


def test_naflex_is_restored(tmp_path):
    save_folder(tmp_path / "folder", *convert(ORIGINAL))
    model = load_model(tmp_path / "folder")
    export(model, tmp_path / "back.npz", "jax", original=ORIGINAL)
    assert stored(tmp_path / "back.npz") == stored(ORIGINAL)
    export(model, tmp_path / "alone.npz", "jax", dialect="big_vision")
    own = {name: array for name, *array in stored(ORIGINAL) if name.startswith("params/img/") and "block/" not in name}
    alone = {f"params/img/{name}": array for name, *array in stored(tmp_path / "alone.npz") if "block_" not in name}
    assert alone == own


def test_a_folder_in_transformers(tmp_path, expected):
    assert convert(ORIGINAL, read_weights=False).save(tmp_path / "folder").model.device.type == "meta"
    extract = pipeline("image-feature-extraction", model=str(tmp_path / "folder"))
    assert relative_gap(run(extract.model, expected).pooler_output, expected["pooled"]) <= 2e-5
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 50, 3), np.uint8))
    batch = extract.image_processor(image, return_tensors="pt")
    assert batch.spatial_shapes.prod() <= 16
    with torch.no_grad():
        features = extract.model(**batch).last_hidden_state
    torch.testing.assert_close(torch.tensor(extract(image)), features, rtol=0, atol=1e-6)


def test_patches_that_are_not_square_are_refused(tmp_path):
    kernel, positions = "params/img/embedding/kernel", "params/img/pos_embedding"
    arrays = read_arrays(ORIGINAL)
    for changes, message in (
        ({kernel: arrays[kernel][:47]}, "changed.npz"),
        ({positions: arrays[positions][..., :16]}, r"\(1, 16, 16\)"),
    ):
        np.savez(tmp_path / "changed.npz", **arrays | changes)
        with pytest.raises(ConversionError, match=message):
            convert(tmp_path / "changed.npz")
