"""Images in their own aspect ratio, compared with transformers' Siglip2 image processor."""

import math

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.models.siglip2.image_processing_pil_siglip2 import (
    Siglip2ImageProcessorPil,
    convert_image_to_patches,
    get_image_size_for_max_num_patches,
)

from hf_vit.models.image_processing_hf_vit import HfViTImageProcessor, patchify
from hf_vit.models.image_resizing import fit_grid

SIZES = [(37, 53), (53, 37), (200, 310), (16, 16), (90, 7), (8, 400), (33, 47)]


def pictures():
    generator = np.random.default_rng(2)
    return [Image.fromarray(generator.integers(0, 256, (*size, 3), dtype=np.uint8)) for size in SIZES]


@pytest.mark.parametrize("max_num_patches", [1, 7, 35, 256])
def test_grids_equal_siglip2(max_num_patches):
    for height, width in [*SIZES, (375, 500), (3000, 4000), (6000, 8000)]:
        expected = get_image_size_for_max_num_patches(height, width, 16, max_num_patches)
        grid = fit_grid(height, width, (16, 16), max_num_patches)
        assert (grid[0] * 16, grid[1] * 16) == expected, (height, width)


@pytest.mark.parametrize("patch_size", [(16, 16), (8, 14)])
def test_grids_are_the_largest_that_fit(patch_size):
    def grid_at(scale):
        return tuple(math.ceil(scale * side / patch) for side, patch in zip((height, width), patch_size, strict=True))

    for height, width in [*SIZES, (1, 1), (1, 8000)]:
        grid = fit_grid(height, width, patch_size, 35)
        scale = min(rows * patch / side for rows, patch, side in zip(grid, patch_size, (height, width), strict=True))
        assert grid_at(scale * (1 - 1e-9)) == grid
        assert math.prod(grid) <= 35 < math.prod(grid_at(scale * (1 + 1e-9)))


def test_the_values_of_a_patch_are_in_the_order_of_siglip2():
    images = torch.rand(2, 5, 6, 9)
    expected = convert_image_to_patches(images[1].numpy(), 3)
    np.testing.assert_array_equal(patchify(images, (3, 3))[1], expected)
    patch = patchify(images, (2, 3))[0, 4]  # (row 1, column 1) of 3 x 3
    np.testing.assert_array_equal(patch, images[0, :, 2:4, 3:6].permute(1, 2, 0).flatten())


def test_pixel_values_equal_siglip2():
    expected = Siglip2ImageProcessorPil(patch_size=16, max_num_patches=35)(pictures(), return_tensors="pt")
    result = HfViTImageProcessor("native", max_num_patches=35)(pictures(), return_tensors="pt")
    assert result.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(result[name], value, atol=1e-6, rtol=0)
        assert result[name].dtype == value.dtype


def test_a_batch_equals_its_single_images():
    processor = HfViTImageProcessor(size=(48, 80), patch_size=(8, 16))
    batch = processor(pictures(), preset="native", return_tensors="pt")
    assert batch.pixel_values.shape == (7, 6 * 5, 8 * 16 * 3)
    assert set(batch) == set(HfViTImageProcessor("native").model_input_names)
    for index, picture in enumerate(pictures()):
        alone = processor(picture, preset="native", padding="longest", return_tensors="pt")
        patches = alone.spatial_shapes.prod()
        assert alone.pixel_values.shape == (1, patches, 8 * 16 * 3)
        assert batch.pixel_attention_mask[index].tolist() == [1] * patches + [0] * (30 - patches)
        assert torch.equal(batch.spatial_shapes[index], alone.spatial_shapes[0])
        assert torch.equal(batch.pixel_values[index, :patches], alone.pixel_values[0])
        assert not batch.pixel_values[index, patches:].any()


def test_without_a_resize_the_patches_must_divide_the_image():
    processor = HfViTImageProcessor("native", do_resize=False, patch_size=16, max_num_patches=6)
    assert processor(np.zeros((32, 48, 3)), return_tensors="pt").spatial_shapes.tolist() == [[2, 3]]
    with pytest.raises(ValueError, match="32 x 50"):
        processor(np.zeros((32, 50, 3)))
    with pytest.raises(ValueError, match="48 x 48"):
        processor(np.zeros((48, 48, 3)))
