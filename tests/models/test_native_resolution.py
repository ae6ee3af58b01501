"""Images in their own aspect ratio, compared with transformers' Siglip2 image processor."""

import math

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.models.siglip2.image_processing_pil_siglip2 import (
    Siglip2ImageProcessorPil,
    get_image_size_for_max_num_patches,
)

from hf_vit.models.image_processing_hf_vit import HfViTImageProcessor
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
    for size in [*SIZES, (1, 1), (1, 8000)]:
        grid = fit_grid(*size, patch_size, 35)
        patches = np.divide(size, patch_size)
        scale = np.min(grid / patches)
        assert tuple(np.ceil(scale * (1 - 1e-9) * patches)) == grid
        assert math.prod(grid) <= 35 < np.ceil(scale * (1 + 1e-9) * patches).prod()


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
    for height, width in ((32, 50), (48, 48)):
        with pytest.raises(ValueError, match=f"{height} x {width}"):
            processor(np.zeros((height, width, 3)))
