"""FlexiViT: stored kernel and positions, resized in every forward, against the outputs of the original JAX code."""

import numpy as np
import pytest
import torch

from hf_vit.conversion import ConversionError, convert, export
from hf_vit.models.flexible_sizes import resize_patch_kernel

from ..comparing import assert_same_file, relative_gap
from ..integration.test_goldens import record_stages
from ..paths import MORE, golden_runs
from ..tiny_models import load_model

RUNS = {run["id"]: run for run in golden_runs("flexivit", "flexivit_baseline", folder=MORE)}
AT_RUN_TIME = [run for run in RUNS.values() if not run.get("at_load")]


def sizes(run: dict) -> dict:
    """Arguments of `convert`, empty for a file whose name determines them; pixels outside the patches are cut off."""
    if run["family"] == "flexivit_baseline":
        return {}
    patch_size = tuple(run["patch_size"])
    image_size = tuple(size // patch * patch for size, patch in zip(run["image_size"], patch_size, strict=True))
    return {"patch_size": patch_size, "image_size": image_size}


def largest_gap(run: dict, model, expected, dtype: torch.dtype, suffix: str = "") -> dict[str, float]:
    """Difference of every stage, relative to its largest value."""
    rows, columns = np.multiply(run["grid"], run["patch_size"])
    images = torch.from_numpy(expected["images"]).permute(0, 3, 1, 2).to(dtype)[:, :, :rows, :columns]
    stages = record_stages(model)
    model(images, output_hidden_states=True)  # without, the last layer computes only what the logits need
    embeddings = model.base_model.embeddings
    kernel = embeddings.patch_embeddings.projection.weight
    stages["patch_kernel"] = resize_patch_kernel(kernel, tuple(run["patch_size"])).permute(2, 3, 1, 0)
    position_embeddings = embeddings.position_embeddings_for(tuple(run["grid"]), kernel)
    stages["pos_embedding"] = position_embeddings[:, model.config.num_prefix_positions :]
    if not model.config.use_cls_token:
        stages["with_posemb"] = stages["embedded"]
    names = [name for name in expected.files if name.endswith(suffix) and name.removesuffix(suffix) in stages]
    names = [name for name in names if suffix or not name.endswith("_f64")]
    assert {"pooled" + suffix, "logits" + suffix} <= set(names)
    ours = {name: stages[name.removesuffix(suffix)].reshape(expected[name].shape) for name in names}
    return {name: relative_gap(ours[name], expected[name]) for name in names}


@pytest.mark.parametrize("run", AT_RUN_TIME, ids=lambda run: run["id"])
@torch.no_grad()
def test_every_stage(run):
    model, _ = convert(MORE / run["checkpoint"], **sizes(run))
    assert model.config.kernel_size == tuple(run["stored_patch"])
    assert model.config.stored_grid == tuple(run["stored_grid"])
    with np.load(MORE / run["expected"]) as expected:
        gaps = largest_gap(run, model, expected, torch.float32)
        if tuple(run["patch_size"]) == (30, 30):  # the original's own float32 is that far off
            gaps = {"logits": gaps["logits"]}
        assert max(gaps.values()) <= 2e-5, gaps
        gaps = largest_gap(run, model.double(), expected, torch.float64, "_f64")
        assert max(gaps.values()) <= 1e-9, gaps


@pytest.mark.parametrize("run", [run for run in AT_RUN_TIME if sizes(run)], ids=lambda run: run["id"])
@torch.no_grad()
def test_a_model_that_is_made_flexible_later(run):
    """The same as with the patch size stated in the conversion; a kernel of 32 is ambiguous and has to be stated."""
    stored = {"patch_size": tuple(run["stored_patch"])} if tuple(run["stored_patch"]) == (32, 32) else {}
    model, _ = convert(MORE / run["checkpoint"], **stored)
    model.make_flexible()
    model.set_patch_size(**sizes(run))
    with np.load(MORE / run["expected"]) as expected:
        gaps = largest_gap(run, model.double(), expected, torch.float64, "_f64")
    assert max(gaps.values()) <= 1e-9, gaps


@torch.no_grad()
def test_both_buffers_resized_at_load():
    """big_vision's `load` with other buffer sizes: positions by corner-aligned zoom, once."""
    run = RUNS["flexi_gap@loaded_p5"]
    model, _ = convert(MORE / run["checkpoint"])
    assert not model.config.is_flexible
    model.set_patch_size(5, image_size=30)
    assert model.vit.embeddings.patch_embeddings.projection.weight.shape[2:] == (5, 5)
    with np.load(MORE / run["expected"]) as expected:
        gaps = largest_gap(run, model, expected, torch.float32)
    assert max(gaps.values()) <= 2e-5, gaps


@pytest.mark.parametrize("new", [(3, 3), (5, 9), (6, 13), (16, 2)])
def test_the_kernel_is_resized_by_its_definition(new):
    """NumPy, float64: pinv(B^T) with the whole B, whose columns are resized basis images, written as loops.

    Where one axis grows and the other shrinks, (6, 13), the whole B has no full rank, and pinv cuts off what is zero.
    """
    old = (7, 8)
    kernel = np.random.default_rng(0).standard_normal((2, 3, *old))
    rows, columns = map(bilinear, old, new)
    inverse = np.linalg.pinv(np.kron(rows, columns).T, rcond=1e-10)
    expected = np.einsum("nk,ock->ocn", inverse, kernel.reshape(2, 3, -1)).reshape(2, 3, *new)
    ours = resize_patch_kernel(torch.from_numpy(kernel), new)
    np.testing.assert_allclose(ours.numpy(), expected, rtol=0, atol=1e-11)
    half = resize_patch_kernel(torch.from_numpy(kernel).bfloat16(), new)
    assert half.dtype == torch.bfloat16
    np.testing.assert_allclose(half.float().numpy(), expected, rtol=0, atol=2e-2 * np.abs(expected).max())


def bilinear(old: int, new: int) -> np.ndarray:
    matrix = np.zeros((new, old))
    for index in range(new):
        center = (index + 0.5) * old / new - 0.5
        below = int(np.floor(center))
        matrix[index, np.clip(below, 0, old - 1)] += 1 - (center - below)
        matrix[index, np.clip(below + 1, 0, old - 1)] += center - below
    return matrix


def test_the_prefix_is_restored_from_the_source(tmp_path):
    source = MORE / "flexi_map.npz"
    model, _ = convert(source, patch_size=5, image_size=35)
    export(model, tmp_path / "back.npz", "jax", original=source)
    assert_same_file(tmp_path / "back.npz", source)


def test_the_patch_size_must_be_stated_unless_the_name_determines_it(tmp_path):
    run = RUNS["flexi_32_7@p16_240"]
    source = MORE / run["checkpoint"]
    with pytest.raises(ConversionError, match="patch_size"):
        convert(source)
    run_of_it = tmp_path / "big_vision" / "flexivit" / "a_run"
    run_of_it.mkdir(parents=True)
    (run_of_it / "checkpoint.npz").write_bytes((MORE / "flexi_gap.npz").read_bytes())
    with pytest.raises(ConversionError, match="patch_size"):
        convert(run_of_it / "checkpoint.npz")
    (tmp_path / "flexivit_s_i1k.npz").write_bytes(source.read_bytes())
    model, processor = convert(tmp_path / "flexivit_s_i1k.npz")
    assert (model.config.patch_size, model.config.image_size, model.config.is_flexible) == (16, 240, True)
    assert "FlexiViT" in model.conversion_record["flexible"]
    assert (processor.size, processor.crop_size) == ({"height": 272, "width": 272}, {"height": 240, "width": 240})
    assert convert(source, patch_size=32)[0].config.image_size == 224  # 240 is no multiple of it
    stated, _ = convert(source, patch_size=16, position_interpolation="jax")
    assert stated.config.position_interpolation == "jax"


@pytest.mark.parametrize(("patch_size", "image_size"), [(5, 40), ((4, 6), (8, 18))])
def test_a_folder_keeps_the_stored_buffers(tmp_path, patch_size, image_size):
    source = MORE / "flexi_gap.npz"
    straight = (
        convert(source, patch_size=patch_size, image_size=image_size, read_weights=False)
        .save(tmp_path / "folder")
        .model
    )
    assert straight.device.type == "meta"  # streamed: nothing has to be resized
    model = load_model(tmp_path / "folder")
    export(model, tmp_path / "back.npz", "jax")
    with pytest.raises(ConversionError, match="vit_jax"):
        export(model, tmp_path / "other.npz", "jax", dialect="vit_jax")
    assert_same_file(tmp_path / "back.npz", source)
    images = torch.randn(1, 3, *np.broadcast_to(image_size, 2).tolist())
    with torch.no_grad():
        expected = convert(source, patch_size=patch_size, image_size=image_size)[0](images).logits
        # not to the bit: MKL rounds by the alignment of the weights in memory
        torch.testing.assert_close(model(images).logits, expected, rtol=0, atol=1e-6)
