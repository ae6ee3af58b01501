"""The evaluation in timm's config.json, written and read again; timm's own transform judges where it is installed."""

import numpy as np
import pytest
from PIL import Image

from hf_vit import HfViTConfig, HfViTImageProcessor
from hf_vit.conversion import ConversionError
from hf_vit.conversion.timm_preprocessing import evaluation_of, preprocessing_of

from .test_timm import EVALUATIONS, GOLDENS, config_of

IMAGENET = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
SQUASHED = {"crop_mode": "squash", "crop_pct": 1.0}


def config_for(size, channels=3):
    return HfViTConfig(hidden_size=8, num_attention_heads=1, patch_size=4, image_size=size, num_channels=channels)


@pytest.mark.parametrize("case", EVALUATIONS)
def test_what_was_read_is_written(case):
    stated = config_of(case)
    size = tuple(stated["input_size"][1:])
    processor = HfViTImageProcessor.for_model(config_for(size), **preprocessing_of(stated).value)
    assert evaluation_of(processor, config_for(size)) == (stated, [])


# settings of the image processor, image size, what is written (pretrained_cfg)
EXACT = [
    ({"preset": "timm"}, 224, {"crop_pct": 0.9, "interpolation": "bicubic", "mean": [0.5] * 3}),
    ({"preset": "timm"}, 384, {"crop_pct": 1.0, "crop_mode": "center"}),
    (
        {"preset": "timm", "resample": 2, "crop_pct": 0.95, **IMAGENET},
        224,
        {"crop_pct": 0.95, "interpolation": "bilinear", "mean": IMAGENET["image_mean"], "std": IMAGENET["image_std"]},
    ),
    ({"preset": "timm", "crop_pct": 224 / 256}, 224, {"crop_pct": 0.875}),
    ({"preset": "transformers"}, (32, 48), {**SQUASHED, "interpolation": "bilinear", "input_size": [3, 32, 48]}),
    ({"preset": "transformers", "resample": 1}, 32, {**SQUASHED, "interpolation": "lanczos"}),
    ({"preset": "transformers", "do_normalize": False}, 32, {"mean": [0.0] * 3, "std": [1.0] * 3}),
    ({"preset": "transformers", "rescale_factor": 1 / 127.5}, 32, {"mean": [0.25] * 3, "std": [0.25] * 3}),
    ({"preset": "transformers", "do_rescale": False, "image_mean": [127.5] * 3}, 32, {"mean": [0.5] * 3}),
    ({"preset": "transformers", "num_channels": 1}, 32, {"mean": [0.5], "input_size": [1, 32, 32]}),
]
# settings, image size, what is written, and a word of each difference that is named
NAMED = [
    ({"preset": "vit_jax"}, 32, {**SQUASHED, "interpolation": "bilinear"}, ["antialias", "float"]),
    ({"preset": "augreg"}, 32, {"crop_pct": 0.875, "interpolation": "bilinear"}, ["area", "antialias", "truncated"]),
    ({"preset": "timm"}, (32, 48), {"crop_mode": "center"}, ["shortest_edge"]),
    ({"preset": "native"}, 32, SQUASHED, ["different sizes"]),
    ({"preset": "timm", "size": {"shortest_edge": 32}, "do_center_crop": False}, 32, SQUASHED, ["different sizes"]),
]


@pytest.mark.parametrize(
    ("settings", "size", "written", "named"),
    [*((*row, []) for row in EXACT), *NAMED],
    ids=lambda value: str(value)[:60],
)
def test_the_evaluation_is_that_of_the_image_processor(settings, size, written, named):
    config = config_for(size, settings.get("num_channels", 3))
    evaluation, differences = evaluation_of(HfViTImageProcessor.for_model(config, **settings), config)
    assert {name: evaluation[name] for name in written} == written
    assert bool(differences) == bool(named)
    assert all(any(word in text for text in differences) for word in named), differences


@pytest.mark.parametrize(("settings", "size", "written"), EXACT, ids=lambda value: str(value)[:60])
def test_timm_and_hf_vit_compute_the_same_pixels(timm, settings, size, written):
    config = config_for(size, settings.get("num_channels", 3))
    processor = HfViTImageProcessor.for_model(config, **settings)
    evaluation, _ = evaluation_of(processor, config)
    again = HfViTImageProcessor.for_model(config, **preprocessing_of(evaluation).value)
    image = Image.fromarray(GOLDENS["image"])
    if config.num_channels == 1:
        image = image.convert("L")
    transform = timm.data.create_transform(**timm.data.resolve_data_config(pretrained_cfg=evaluation))
    theirs = transform(image).numpy()
    for ours in (processor, again):
        pixel_values = ours(image, return_tensors="np").pixel_values[0]
        np.testing.assert_allclose(pixel_values, theirs, rtol=0, atol=1e-6 * max(1, np.abs(theirs).max()))


def test_images_of_another_size_than_the_models_are_refused():
    processor = HfViTImageProcessor(size=48, preset="timm")
    with pytest.raises(ConversionError, match="48 x 48"):
        evaluation_of(processor, config_for(32))


def test_timms_crop_of_images_that_are_not_square_is_named():
    """timm resizes until both sides are covered (ResizeKeepRatio), the image processor the shorter side."""
    read = preprocessing_of({"input_size": [3, 32, 48], "crop_pct": 0.9, "mean": [0.5], "std": [0.5]})
    assert read.is_assumed
