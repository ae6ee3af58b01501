"""Patch sizes: a flexible model takes one in each forward; a fixed model is resized permanently."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoModelForImageClassification, ViTForImageClassification

from hf_vit.conversion import export
from hf_vit.conversion.converting import convert
from hf_vit.loading import load
from hf_vit.models.flexible_sizes import resize_patch_kernel
from hf_vit.models.image_processing_hf_vit import patchify
from hf_vit.models.modeling_hf_vit_variants import HfViTBackbone, HfViTForImageClassification

from ..tiny_models import VARIANTS, save_tiny, tiny, tiny_bit

FLEXIBLE = {"stored_patch_size": (7, 5), "position_grid": (3, 4), "position_interpolation": "bilinear"}
SIZES = [(4, 6), 5, (9, 2)]
fixed_and_flexible = pytest.mark.parametrize("fields", [{}, FLEXIBLE], ids=["fixed", "flexible"])


def pixels(patch_size, rows: int = 3, columns: int = 5) -> torch.Tensor:
    height, width = np.broadcast_to(patch_size, 2).tolist()
    return torch.randn(2, 3, rows * height, columns * width, generator=torch.Generator().manual_seed(1))


def kernel_of(model) -> torch.Tensor:
    return model.base_model.embeddings.patch_embeddings.projection.weight


@pytest.mark.parametrize(
    "name", ["cls", "no position of the class token", "sincos", "learned2d", "every layer", "relative"]
)
@torch.no_grad()
def test_a_flexible_model_changes_its_patch_size_without_loss(name):
    """Each size gives the outputs of a model with resized weights; the stored weights do not change."""
    fields = {**FLEXIBLE, **VARIANTS[name]}
    model = tiny(**fields)
    before = copy.deepcopy(model.state_dict())
    for patch_size in (*SIZES, *SIZES):
        images = pixels(patch_size)
        in_the_call = model(images, patch_size=patch_size).logits
        model.set_patch_size(patch_size)
        assert torch.equal(model(images).logits, in_the_call)
        fixed = tiny(**fields, patch_size=patch_size, image_size=tuple(images.shape[2:]))
        fixed.load_state_dict(before)
        fixed.make_fixed()
        assert not fixed.config.is_flexible
        assert kernel_of(fixed).shape[2:] == tuple(np.broadcast_to(patch_size, 2))
        torch.testing.assert_close(fixed(images).logits, in_the_call, rtol=0, atol=1e-5)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


@torch.no_grad()
def test_every_forward_takes_a_patch_size():
    model = tiny(**FLEXIBLE, pooling="mean")
    images = pixels((9, 2))
    with pytest.raises(ValueError, match="27"):
        model(images)
    for wrong in (0, "16", 4.5, (4, 4, 4)):
        with pytest.raises(ValueError, match="patch_size"):
            model(images, patch_size=wrong)
    states = model.vit(images, patch_size=[9, 2]).last_hidden_state
    model.config.out_features = ["stage3"]
    backbone = HfViTBackbone(model.config)
    backbone.load_state_dict(model.vit.state_dict(), strict=False)
    maps = backbone.eval()(images, patch_size=(9, 2)).feature_maps[0]
    assert torch.equal(maps.flatten(2).transpose(1, 2), states)
    patches = {"pixel_values": patchify(images, (9, 2)), "spatial_shapes": torch.tensor([[3, 5]] * 2)}
    together = model.vit(**patches, patch_size=(9, 2)).last_hidden_state
    torch.testing.assert_close(together, states, rtol=0, atol=1e-6)


@torch.no_grad()
def test_a_model_with_one_patch_size_is_resized_permanently():
    model = tiny(image_size=(24, 36))
    stored = kernel_of(model).clone()
    with pytest.raises(ValueError, match=r"\(4, 6\)"):
        model(pixels((8, 9)), patch_size=(8, 9))
    with pytest.raises(ValueError, match="24"):
        model.set_patch_size(5)
    model.set_patch_size((8, 9))
    assert torch.equal(kernel_of(model), resize_patch_kernel(stored, (8, 9)))
    assert model.vit.embeddings.position_embeddings.shape == (1, 1 + 3 * 4, 14)
    assert (model.config.patch_size, model.config.image_size) == ((8, 9), (24, 36))
    assert model(pixels((8, 9), 3, 4)).logits.shape == (2, 11)
    model.set_patch_size(5, image_size=(25, 20))
    assert model(pixels(5, 5, 4)).logits.shape == (2, 11)
    with pytest.raises(ValueError, match="HfBiT"):
        tiny_bit().set_patch_size(4)


@pytest.mark.parametrize("image_size", [None, (18, 10)])
@fixed_and_flexible
@torch.no_grad()
def test_patch_size_is_an_argument_of_loading(tmp_path, fields, image_size):
    model = tiny(**fields, image_size=(36, 60))
    model.save_pretrained(tmp_path)
    stored = copy.deepcopy(model.state_dict())
    sizes: dict[str, Any] = {"patch_size": (9, 2)} | ({} if image_size is None else {"image_size": image_size})
    loaded = HfViTForImageClassification.from_pretrained(tmp_path, **sizes)
    by_auto = AutoModelForImageClassification.from_pretrained(tmp_path, **sizes)
    model.set_patch_size(**sizes)
    images = pixels((9, 2)) if image_size is None else pixels((9, 2), 2, 5)
    for other in (loaded, by_auto):
        for field in ("patch_size", "image_size", "stored_patch_size", "stored_grid"):
            ours, theirs = getattr(model.config, field), getattr(other.config, field)
            assert theirs == ours or tuple(theirs) == ours, field
        assert torch.equal(other(images).logits, model(images).logits)
    if fields:
        torch.testing.assert_close(loaded.state_dict(), stored, rtol=0, atol=0)
    loaded.save_pretrained(tmp_path / "again")
    again = AutoModel.from_pretrained(tmp_path / "again")
    assert torch.equal(again(images).pooler_output, model.vit(images).pooler_output)
    assert (tuple(again.config.patch_size), again.config.stored_grid) == ((9, 2), model.config.stored_grid)


@torch.no_grad()
@fixed_and_flexible
def test_load_sets_patch_and_image_size_of_model_and_processor(tmp_path, fields):
    model, processor = load(save_tiny(tmp_path / "folder", **fields), patch_size=(9, 2), image_size=(18, 10))
    images = processor(np.zeros((30, 40, 3), np.uint8), return_tensors="pt")
    assert images.pixel_values.shape == (1, 3, 18, 10)
    assert model(**images).logits.shape == (1, 11)
    with pytest.raises(ValueError, match="14"):
        load(tmp_path / "folder", patch_size=7)


@torch.no_grad()
def test_the_table_of_a_new_flexible_model_keeps_its_grid():
    """The grid follows from the sizes at creation, until these change."""
    model = tiny(stored_patch_size=(7, 5))
    assert model.config.stored_grid == (5, 6)
    expected = model(pixels((4, 6), 5, 6)).logits
    model.set_image_size((8, 12))
    model.set_patch_size(3)
    assert (model.config.stored_grid, model.config.grid_size) == ((5, 6), (2, 4))
    torch.testing.assert_close(model(pixels((4, 6), 5, 6), patch_size=(4, 6)).logits, expected)
    with pytest.raises(ValueError, match="position_grid"):
        tiny(position_grid=3)


def test_the_resized_kernel_follows_the_stored_one_and_trains_it():
    model = tiny(**FLEXIBLE)
    images = pixels((4, 6))
    with torch.no_grad():
        before = model(images).logits
        kernel_of(model).data.mul_(2)  # raises no version
        assert not torch.equal(model(images).logits, before)
    model(images).logits.square().sum().backward()
    assert kernel_of(model).grad.abs().min() > 0
    with torch.autocast("cpu", torch.bfloat16):
        inside = resize_patch_kernel(kernel_of(model), (6, 6))
    assert torch.equal(inside, resize_patch_kernel(kernel_of(model), (6, 6)))  # in float32


@torch.no_grad()
def test_exports_have_the_resized_weights(tmp_path):
    model = tiny(stored_patch_size=7, position_grid=(3, 3), patch_size=6, image_size=30, qkv_bias=True)
    images = torch.randn(2, 3, 30, 30)
    expected = model(images).logits
    export(model, tmp_path / "transformers", "transformers")
    theirs = ViTForImageClassification.from_pretrained(tmp_path / "transformers").eval()
    torch.testing.assert_close(theirs(images).logits, expected, rtol=0, atol=1e-5)
    export(model, tmp_path / "timm.safetensors", "timm")
    again, _ = convert(tmp_path / "timm.safetensors", num_attention_heads=2, hidden_act="gelu_pytorch_tanh")
    assert not again.config.is_flexible
    torch.testing.assert_close(again(images).logits, expected, rtol=0, atol=1e-5)
    assert model.config.is_flexible


@pytest.mark.slow
@torch.no_grad()
def test_compiled_and_exported_forwards_resize_too():
    model = tiny(**FLEXIBLE)
    images = pixels((4, 6))
    program = torch.export.export(model, (), {"pixel_values": images}).module()
    torch.testing.assert_close(program(pixel_values=images).logits, model(images).logits)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    for patch_size in SIZES:
        images = pixels(patch_size)
        expected = model(images, patch_size=patch_size).logits
        torch.testing.assert_close(compiled(images, patch_size=patch_size).logits, expected)
