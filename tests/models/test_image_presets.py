"""Presets on real photographs, compared with an independent computation; dependencies between settings."""

import numpy as np
import pytest
import torch
from PIL import Image

from hf_vit.models.image_processing_hf_vit import PRESETS, HfViTImageProcessor, default_settings, override_settings

from ..photographs import pixels_of, read_photographs


@pytest.fixture(scope="module")
def photographs(shared):
    return read_photographs(shared)


# The presets in float64: each axis is a matrix (new, old), by the definition of the filter.


def linear(old, new):
    position = np.clip((np.arange(new) + 0.5) * old / new - 0.5, 0, old - 1)
    return np.maximum(0, 1 - np.abs(position[:, None] - np.arange(old)))


def area(old, new):
    start, pixel = np.arange(new)[:, None] * old / new, np.arange(old)
    return np.clip(np.minimum(start + old / new, pixel + 1) - np.maximum(start, pixel), 0, None) * new / old


def antialiased(old, new, kernel, support):
    stretch = max(old / new, 1)
    center = (np.arange(new)[:, None] + 0.5) * old / new
    pixel = np.arange(old) + 0.5
    weights = np.where(np.abs(pixel - center) < support * stretch, kernel(np.abs(pixel - center) / stretch), 0)
    return weights / weights.sum(1, keepdims=True)


def triangle(old, new):
    return antialiased(old, new, lambda x: np.maximum(0, 1 - x), 1)


def cubic(old, new):  # Keys' with a = -1/2
    inner, outer = lambda x: (1.5 * x - 2.5) * x * x + 1, lambda x: ((-0.5 * x + 2.5) * x - 4) * x + 2
    return antialiased(old, new, lambda x: np.where(x < 1, inner(x), outer(x)), 2)


def resize(pixels, height, width, weights, after_each_axis=lambda pixels: pixels):
    planes = after_each_axis(pixels.transpose(2, 0, 1) @ weights(pixels.shape[1], width).T)
    return after_each_axis(weights(pixels.shape[0], height) @ planes).transpose(1, 2, 0)


def round_and_clip(pixels):
    return np.clip(np.rint(pixels), 0, 255)


def truncate(pixels):
    return np.floor(pixels + 1e-9)


def vit_jax(pixels):
    return resize(pixels, 224, 224, linear)


def lit(pixels):
    return truncate(resize(pixels, 224, 224, linear))


def augreg(pixels):
    height, width = (int(np.rint(side * 256 / min(pixels.shape[:2]))) for side in pixels.shape[:2])
    top, left = (height - 224) // 2, (width - 224) // 2
    return truncate(resize(pixels, height, width, area))[top : top + 224, left : left + 224]


def timm(pixels):
    height, width = (side * 248 // min(pixels.shape[:2]) for side in pixels.shape[:2])
    top, left = round((height - 224) / 2), round((width - 224) / 2)
    return resize(pixels, height, width, cubic, round_and_clip)[top : top + 224, left : left + 224]


def transformers(pixels):
    return resize(pixels, 224, 224, triangle, round_and_clip)


# preset: (its computation, largest difference in levels from 0 to 255, largest share of pixels a level or more off).
# TensorFlow's positions are float32: up to 0.012 levels over all 117 photographs. Where it truncates, whole numbers may
# fall to the level below, which the area resize has many of. Pillow's weights have 22 bits: seldom a level, or two if
# both axes round badly.
COMPUTATIONS = {
    "vit_jax": (vit_jax, 0.02, 0),
    "lit": (lit, 1, 0.001),
    "augreg": (augreg, 1, 0.03),
    "big_vision": (augreg, 1, 0.03),
    "timm": (timm, 2, 0.003),
    "transformers": (transformers, 2, 0.004),
}


@pytest.mark.parametrize("preset", COMPUTATIONS)
def test_presets_on_real_photographs(photographs, preset):
    compute, largest_difference, largest_share = COMPUTATIONS[preset]
    processor = HfViTImageProcessor(preset)
    differences = []
    for photograph in photographs.values():
        pixels = pixels_of(photograph)
        pixel_values = processor(pixels.astype(np.uint8), return_tensors="np").pixel_values[0].transpose(1, 2, 0)
        levels = (pixel_values.astype(np.float64) + 1) * 127.5
        differences.append(np.abs(levels - compute(pixels)))
    assert len(differences) == 26
    assert np.max(differences) <= largest_difference + 1e-4
    assert np.mean(np.stack(differences) > 0.5) <= largest_share


@pytest.mark.parametrize("preset", PRESETS)
def test_backends_agree_to_the_last_bit(photographs, preset):
    processor = HfViTImageProcessor(preset)
    pillow, pytorch = (
        processor(list(photographs.values()), return_tensors="pt", backend=name).pixel_values
        for name in ("pillow", "torch")
    )
    torch.testing.assert_close(pytorch, pillow, atol=0, rtol=0)


def changed(**changes):
    return override_settings(default_settings(), changes)


def sizes(settings):
    return settings["size"], settings["crop_size"] if settings["do_center_crop"] else None


def square(side):
    return {"height": side, "width": side}


@pytest.mark.parametrize(
    ("preset", "side", "resized"),
    [("augreg", 224, 256), ("augreg", 384, 448), ("big_vision", 224, 256), ("timm", 224, 248), ("timm", 384, 384)],
)
def test_resize_before_the_crop(preset, side, resized):
    expected = ({"shortest_edge": resized}, square(side))
    assert sizes(changed(preset=preset, size=side)) == expected
    assert sizes(override_settings(changed(preset=preset), {"size": square(side)})) == expected
    assert sizes(override_settings(changed(size=side), {"preset": preset})) == expected
    assert sizes(override_settings(changed(preset=preset, size=side), {"preset": "vit_jax"})) == (square(side), None)


def test_stated_sizes_are_used_literally():
    augreg = changed(preset="augreg")
    assert sizes(override_settings(augreg, {"size": {"shortest_edge": 300}})) == ({"shortest_edge": 300}, square(224))
    assert sizes(override_settings(augreg, {"size": 300, "crop_size": 200})) == (square(300), square(200))
    assert sizes(override_settings(augreg, {"crop_size": 200})) == ({"shortest_edge": 256}, square(200))
    assert sizes(override_settings(augreg, {"crop_pct": 0.5})) == ({"shortest_edge": 448}, square(224))
    assert sizes(override_settings(augreg, {"size": (160, 240)}))[1] == {"height": 160, "width": 240}
    assert sizes(override_settings(augreg, {"size": 300, "do_center_crop": False})) == (square(300), None)


def test_a_preset_sets_its_resize():
    settings = override_settings(changed(image_std=[0.1, 0.2, 0.3]), {"preset": "timm"})
    assert (settings["resample"], settings["antialias"], settings["resize_output"]) == (3, True, "rounded")
    assert settings["image_std"] == [0.5, 0.5, 0.5]
    assert changed(preset="timm", image_std=[0.1, 0.2, 0.3])["image_std"] == [0.1, 0.2, 0.3]
    assert changed(size=None, preset=None, do_resize=None) == default_settings()  # None keeps a setting


def test_the_number_of_channels_and_the_mean_follow_each_other():
    assert changed(num_channels=5)["image_mean"] == [0.5] * 5
    assert changed(num_channels=1, image_mean=0.25)["image_mean"] == [0.25]
    assert changed(image_mean=[0.1, 0.2], image_std=[1, 1])["num_channels"] == 2
    with pytest.raises(ValueError, match="image_std"):
        changed(image_mean=[0.1, 0.2])


def test_patches_of_the_native_preset():
    assert changed(preset="native")["max_num_patches"] == 14 * 14
    assert changed(preset="native", size=(64, 96), patch_size=(16, 32))["max_num_patches"] == 4 * 3
    assert override_settings(changed(preset="native"), {"size": 384})["max_num_patches"] == 24 * 24
    assert changed(preset="native", size=384, max_num_patches=100)["max_num_patches"] == 100


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"preset": "vit"}, "'vit'"),
        ({"backend": "torchvision"}, "'torchvision'"),
        ({"size": {"longest_edge": 5}}, "shortest_edge"),
        ({"size": 0}, "size"),
        ({"crop_size": {"shortest_edge": 5}}, "crop_size"),
        ({"resample": 3}, "resize_output"),
        ({"preset": "timm", "antialias": False}, "resize_output"),
        ({"patch_size": (16, 0)}, "patch"),
        ({"max_num_patches": -1}, "max_num_patches"),
        ({"do_pad": True}, "do_pad"),
        ({"image_std": [0.5, 0, 0.5]}, "image_std"),
    ],
)
def test_invalid_settings_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        HfViTImageProcessor(**changes)


def test_a_crop_without_a_size_cuts_the_short_side():
    """As torchvision's Resize(24) and CenterCrop(24)."""
    processor = HfViTImageProcessor("transformers", size={"shortest_edge": 24}, do_center_crop=True)
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (60, 90, 3), np.uint8))
    pixel_values = processor(image, return_tensors="np").pixel_values
    resized = np.asarray(image.resize((36, 24), Image.Resampling.BILINEAR))[:, 6:30]
    np.testing.assert_allclose(pixel_values[0].transpose(1, 2, 0), resized / 127.5 - 1, atol=1e-6)
