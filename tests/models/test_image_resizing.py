"""Each resize against TensorFlow's own outputs; all implementations against each other."""

import numpy as np
import PIL
import pytest
import torch
from PIL import Image

from hf_vit.models.image_resizing import Filter, clip_window, crop_to, pad_to, resize
from hf_vit.models.resize_weights import AREA, BICUBIC, BILINEAR, center_window, shortest_edge_size

from ..paths import GOLDENS

PILLOW_VERSION = tuple(int(part) for part in PIL.__version__.split(".")[:2])
TENSORFLOW_PIXELS = np.load(GOLDENS / "preprocess.npz")
# kind of golden: (resample, antialias, output), largest difference in levels
TENSORFLOW = {
    "bv_resize_u8": ((BILINEAR, False, "truncated"), 0),
    "bv_resize_small_bilinear_u8": ((BILINEAR, False, "truncated"), 0),
    "bv_resize_small_area_u8": ((AREA, False, "truncated"), 0),
    "area_float": ((AREA, False, "float"), 1e-6),
    "antialias_float": ((BILINEAR, True, "float"), 1e-3),
    "bv_resize_antialias_u8": ((BILINEAR, True, "truncated"), 1),
}
FILTERS = {
    "bilinear": Filter(BILINEAR, False, "float", False),
    "area": Filter(AREA, False, "truncated", False),
    "antialiased": Filter(BICUBIC, True, "float", False),
    "Pillow": Filter(BICUBIC, True, "rounded", True),
    "like Pillow": Filter(BICUBIC, True, "rounded", False),
}


def whole(size):
    return range(size[0]), range(size[1])


def random_levels(channels, height, width, seed=3):
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, (channels, height, width), dtype=np.uint8))


def channels_last(levels):
    """Return the same values in the memory layout of a decoded image."""
    return levels.movedim(0, -1).contiguous().movedim(-1, 0)


@pytest.mark.parametrize("kind", TENSORFLOW)
def test_resizing_equals_tensorflow(kind):
    (resample, antialias, output), tolerance = TENSORFLOW[kind]
    keys = [key for key in TENSORFLOW_PIXELS.files if f"/{kind}/" in key]
    assert len(keys) == 6
    for key in keys:
        levels = torch.from_numpy(TENSORFLOW_PIXELS[key.split("/")[0]]).movedim(-1, 0)
        size = TENSORFLOW_PIXELS[key].shape[:2]
        for layout in (levels, levels.contiguous(), torch.stack([levels.flip(0), levels])[1]):
            resized = resize(layout, size, whole(size), Filter(resample, antialias, output, False))
            difference = resized.movedim(0, -1).numpy().astype(np.float32) - TENSORFLOW_PIXELS[key].astype(np.float32)
            assert np.abs(difference).max() <= tolerance, key


@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("old", [(1, 1), (1, 67), (23, 1), (37, 53), (150, 41)])
@pytest.mark.parametrize("channels", [1, 2, 3, 4, 5])
def test_layout_batch_and_window_change_nothing(name, old, channels):
    size, window = (20, 36), (range(3, 19), range(7, 30))
    levels = random_levels(channels, *old)
    expected = resize(levels, size, whole(size), FILTERS[name])
    assert expected.shape == (channels, *size)
    part = resize(levels, size, window, FILTERS[name])
    torch.testing.assert_close(part, crop_to(expected, window), atol=0, rtol=0)
    other = resize(channels_last(levels), size, whole(size), FILTERS[name])
    torch.testing.assert_close(other, expected, atol=0, rtol=0)
    batch = resize(torch.stack([levels.flip(1), levels]), size, whole(size), FILTERS[name])
    torch.testing.assert_close(batch[1], expected, atol=0, rtol=0)


@pytest.mark.parametrize("resample", [BILINEAR, BICUBIC])
@pytest.mark.parametrize(
    "old", [(1, 1), (1, 67), (201, 2), (350, 3), (20, 36), (31, 36), (37, 53), (300, 400), (97, 71)]
)
@pytest.mark.parametrize("new", [(20, 36), (62, 53), (7, 200)])
@pytest.mark.parametrize("extreme", [False, True])
def test_filters_are_bit_identical_to_pillow(resample, old, new, extreme):
    if old[0] > 100 * old[1] and PILLOW_VERSION < (12, 2):
        pytest.skip("Pillow before 12.2 resizes columns of pixels in another order")
    levels = random_levels(3, *old)
    levels = (levels > 127).to(torch.uint8) * 255 if extreme else levels  # black and white: overshoots are clipped
    expected = np.asarray(Image.fromarray(levels.movedim(0, -1).numpy()).resize(new[::-1], resample))
    for use_pillow in (True, False):
        resized = resize(levels, new, whole(new), Filter(resample, True, "rounded", use_pillow))
        np.testing.assert_array_equal(resized.movedim(0, -1).numpy(), expected)


def test_two_and_four_channels_are_not_treated_as_alpha():
    levels, size = random_levels(4, 37, 53), (20, 36)
    resized = resize(levels, size, whole(size), FILTERS["Pillow"])
    alone = [resize(channel[None], size, whole(size), FILTERS["Pillow"]) for channel in levels]
    torch.testing.assert_close(resized, torch.cat(alone))


def test_a_filter_that_only_pillow_has_is_refused_by_torch():
    with pytest.raises(ValueError, match=r"\[2, 3\]"):
        resize(random_levels(3, 7, 9), (5, 6), whole((5, 6)), Filter(1, True, "rounded", False))


def test_sizes_of_the_shortest_edge():
    for height, width, side, *expected in np.load(GOLDENS / "training" / "preprocessing.npz")["resize_small_sizes"]:
        assert shortest_edge_size(height, width, side, truncate=False) == tuple(expected)
    # 101 * 40 / 75 = 53.87 is rounded by big_vision, truncated by torchvision
    assert shortest_edge_size(75, 101, 40, truncate=False) == (40, 54)
    assert shortest_edge_size(75, 101, 40, truncate=True) == (40, 53)


# (old, new) pixels -> offset as rounded by big_vision, transformers and torchvision
OFFSETS = {
    (7, 4): (1, 1, 2),  # half of 3 pixels is rounded to even by torchvision
    (5, 4): (0, 0, 0),
    (8, 4): (2, 2, 2),
    (3, 4): (0, -1, 0),  # a border of 1 pixel: transformers has it before the image
    (1, 4): (-1, -2, -1),
}


@pytest.mark.parametrize("pixels", OFFSETS)
def test_offsets_of_the_crop(pixels):
    roundings = ("toward_zero", "down", "half_even")
    old, new = pixels
    crop_size = {"height": new, "width": 8}
    windows = [center_window((old, 8), crop_size, rounding) for rounding in roundings]
    assert [columns for _, columns in windows] == [range(8)] * 3
    assert [rows for rows, _ in windows] == [range(offset, offset + new) for offset in OFFSETS[pixels]]


def test_a_window_beyond_the_image_has_a_black_border():
    levels, size, window = torch.ones(1, 3, 4), (3, 4), (range(-1, 5), range(1, 6))
    padded = pad_to(crop_to(levels, clip_window(window, size)), window, size)
    assert padded.shape == (1, 6, 5)
    assert padded[0, 1:4, :3].sum() == padded.sum() == 9
