"""Images of any size, and images of several shapes in one batch."""

from itertools import product

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageClassification

from hf_vit.models.image_processing_hf_vit import patchify

from ..tiny_models import VARIANTS, tiny

MODELS = {
    **VARIANTS,
    "1-D shared": {"position_embedding_placement": "every_layer_shared"},
    "map and class token": {"pooling": "map", "use_cls_token": True},
    "2-D shared": {"position_embedding_type": "learned2d", "position_embedding_placement": "every_layer_shared"},
}
NATIVE = [
    "cls",
    "no position of the class token",
    "mean",
    "map and class token",
    "sincos",
    "no positions",
    "learned2d",
    "hybrid",
]
GRIDS = [(3, 5), (5, 6), (3, 5), (7, 2), (1, 1)]


def patch_pixels(config) -> tuple[int, int]:
    height, width = config.patch_size
    return height * config.stride, width * config.stride


def photographs(config) -> list[torch.Tensor]:
    torch.manual_seed(3)
    height, width = patch_pixels(config)
    return [torch.randn(3, rows * height, columns * width) for rows, columns in GRIDS]


def as_patches(config, images) -> dict[str, torch.Tensor]:
    length = max(rows * columns for rows, columns in GRIDS) + 2
    pixel_values = torch.full((len(images), length, 3 * np.prod(patch_pixels(config))), 7.0)  # padding must not count
    mask = torch.zeros(len(images), length, dtype=torch.int32)
    for index, image in enumerate(images):
        patches = patchify(image, patch_pixels(config))
        pixel_values[index, : len(patches)] = patches
        mask[index, : len(patches)] = 1
    return {"pixel_values": pixel_values, "pixel_attention_mask": mask, "spatial_shapes": torch.tensor(GRIDS)}


@torch.no_grad()
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # flex attention in transformers and torch has its own
@pytest.mark.parametrize(
    ("name", "attention"),
    [*product(NATIVE, ("eager", "sdpa")), pytest.param("sincos", "flex_attention", marks=pytest.mark.slow)],
)
def test_images_of_several_shapes_equal_each_alone(name, attention):
    model = tiny(**MODELS[name])
    images = photographs(model.config)
    alone = torch.cat([model(image[None]).logits for image in images])
    model.set_attn_implementation(attention)
    embedded = []
    model.vit.embeddings.patch_embeddings.register_forward_hook(lambda *_: embedded.append(1))
    together = model(**as_patches(model.config, images)).logits
    assert len(embedded) == 1  # with sharded weights every process must make the same number of calls
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-5)


def test_patches_of_the_wrong_size_are_refused():
    model = tiny()
    with pytest.raises(ValueError, match="70"):
        model(torch.zeros(1, 4, 70), spatial_shapes=torch.tensor([[2, 2]]))
    with pytest.raises(ValueError, match=r"\b6\b"):
        model(torch.zeros(1, 4, 72), spatial_shapes=torch.tensor([[3, 2]]))


@torch.no_grad()
def test_saves_record_the_trained_size_and_the_history(tmp_path):
    tiny().save_pretrained(tmp_path)
    for image_size in ((40, 54), (20, 36)):
        model = AutoModelForImageClassification.from_pretrained(tmp_path, image_size=image_size)
        model.save_pretrained(tmp_path)
    config = AutoModelForImageClassification.from_pretrained(tmp_path).config
    assert [tuple(size) for size in config.image_size_history] == [(20, 36), (40, 54)]
    assert tuple(config.image_size) == (20, 36)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "method"),
    [
        *(("cls", method) for method in ("jax", "jax_exact", "bilinear", "bicubic")),
        *(("learned2d", "bicubic"), ("1-D shared", "jax"), ("relative", "bicubic"), ("axial", "jax")),
    ],
)
def test_exports_with_dynamic_height_and_width(name, method):
    model = tiny(**MODELS[name], position_interpolation=method)
    batch, rows, columns = (torch.export.Dim(name, min=2, max=64) for name in ("batch", "rows", "columns"))
    shapes = {"pixel_values": {0: batch, 2: 4 * rows, 3: 6 * columns}}
    program = torch.export.export(model, (torch.randn(2, 3, 12, 24),), dynamic_shapes=(*shapes.values(),), strict=False)
    for size in ((3, 3, 20, 36), (2, 3, 32, 18)):
        pixel_values = torch.randn(size)
        with torch.no_grad():
            logits = program.module()(pixel_values).logits
            torch.testing.assert_close(logits, model(pixel_values).logits, rtol=0, atol=1e-5)


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("name", ["cls", "2-D shared", "relative", "axial"])
def test_compiles_for_any_size(name):
    torch.compiler.reset()  # other tests compile the same code for other models
    model = tiny(**MODELS[name])
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="eager")
    for size in ((2, 3, 20, 36), (2, 3, 24, 42), (3, 3, 32, 18)):
        pixel_values = torch.randn(size)
        torch.testing.assert_close(compiled(pixel_values).logits, model(pixel_values).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("positions", ["cls", "learned2d", "every layer", "shared by layers", "relative"])
@pytest.mark.parametrize("trains", [True, False])
def test_frozen_position_embeddings_stay_frozen_at_another_size(positions, trains):
    model = tiny(**VARIANTS[positions]).requires_grad_(trains)
    before = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    model.set_image_size((24, 48))
    assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} == before
    assert set(before.values()) == {trains}


@pytest.mark.parametrize(
    "change",
    [
        lambda table: table.data.mul_(3),
        lambda table: table.detach().numpy().fill(0.5),
        lambda table: torch.optim.SGD([table], lr=1.0, fused=True).step(),
    ],
    ids=[".data", "numpy", "fused optimizer"],
)
def test_resampled_positions_follow_changes_without_a_version_counter(change):
    model, images = tiny(), torch.randn(2, 3, 3 * 4, 7 * 6)
    table = model.base_model.embeddings.position_embeddings
    with torch.no_grad():
        before = model(images).logits
        table.grad = torch.ones_like(table) * torch.arange(table.shape[1])[None, :, None]
        change(table)
        after = model(images).logits
    assert not torch.equal(after, before)
    torch.testing.assert_close(after, model(images).logits.detach())  # with gradients nothing is kept
