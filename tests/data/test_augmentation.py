"""Augmentation against arrays and crops of the original (TensorFlow): goldens/preprocess.npz and goldens/training."""

import math

import numpy as np
import pytest
from PIL import Image
from scipy.stats import ks_2samp

from hf_vit.data.augmentation import Box, TrainTransform, crop_and_resize, sample_generator, sample_inception_box
from hf_vit.data.randaugment import NAMES, apply, draw


@pytest.fixture(scope="module")
def preprocess(goldens):
    return np.load(goldens / "preprocess.npz")


@pytest.mark.parametrize("name", ["image0/box0", "image1/box0", "image1/box1", "image3/box0"])
def test_crop_and_resize_equals_the_original(preprocess, name):
    """`bv_train` is TensorFlow's crop, resize and cast to uint8, then scaled to [-1, 1]."""
    top, left, height, width, size = preprocess[name].tolist()
    image = Image.fromarray(preprocess[name.split("/")[0]])
    ours = crop_and_resize(image, Box(top, left, height, width), (size, size))
    expected = np.rint((preprocess[f"{name}/bv_train"] + 1) * 127.5).astype(int)
    difference = np.abs(np.asarray(ours).astype(int) - expected)
    assert difference.max() <= 1
    assert (difference > 0).mean() < 0.05  # sums near a whole number truncate one level lower in float32


def test_inception_boxes_are_distributed_as_the_originals(preprocess):
    """1,000 boxes that TensorFlow drew for a 240 x 320 image, area 5-100%, ratio 3/4-4/3."""
    theirs = preprocess["boxes/240x320"]
    rng = np.random.default_rng(5)
    ours = np.array([sample_inception_box(240, 320, ratio=(3 / 4, 4 / 3), rng=rng) for _ in range(4000)])
    for left, right in zip(theirs.T, ours.T, strict=True):
        assert ks_2samp(left, right).pvalue > 0.01
    assert ks_2samp(theirs[:, 2] * theirs[:, 3], ours[:, 2] * ours[:, 3]).pvalue > 0.01
    assert ks_2samp(theirs[:, 3] / theirs[:, 2], ours[:, 3] / ours[:, 2]).pvalue > 0.01


@pytest.mark.parametrize(("height", "width"), [(7, 300), (300, 7), (1, 1), (31, 47)])
def test_boxes_are_inside_any_image(height, width):
    rng = np.random.default_rng(0)
    for _ in range(200):
        box = sample_inception_box(height, width, rng=rng)
        assert 0 <= box.top < box.top + box.height <= height
        assert 0 <= box.left < box.left + box.width <= width


def test_a_sample_depends_on_seed_epoch_and_index_alone(preprocess):
    image = Image.fromarray(preprocess["image3"])
    transform = TrainTransform((20, 36), randaugment_layers=2, randaugment_magnitude=15)
    first = transform(image, sample_generator(1, 2, 3))
    assert first.shape == (20, 36, 3)
    assert first.dtype == np.uint8
    assert np.array_equal(first, transform(image, sample_generator(1, 2, 3)))
    for other in ((2, 2, 3), (1, 3, 3), (1, 2, 4)):
        assert not np.array_equal(first, transform(image, sample_generator(*other)))


def test_flip_mirrors_half_of_the_images():
    image = Image.fromarray(np.arange(12, dtype=np.uint8).reshape(2, 6))
    transform = TrainTransform((2, 6), crop="none", mode="L")
    results = [transform(image, sample_generator(0, 0, index))[..., 0] for index in range(400)]
    mirrored = [np.array_equal(result, np.asarray(image)[:, ::-1]) for result in results]
    plain = [np.array_equal(result, np.asarray(image)) for result in results]
    assert all(a != b for a, b in zip(mirrored, plain, strict=True))
    assert 0.42 < np.mean(mirrored) < 0.58


class HeldDraws:
    """Random generator with given integers, and a given number between 0 and 1 that sets the sign."""

    def __init__(self, *draws: int, sign: str = "plus"):
        self.draws, self.uniform = list(draws), 0.0 if sign == "plus" else 0.9

    def random(self) -> float:
        return self.uniform

    def integers(self, end: int) -> int:
        draw = self.draws.pop(0)
        assert 0 <= draw < end
        return draw


@pytest.mark.parametrize(("crop", "original"), [("resmall", "resmall_crop"), ("random", "resize_crop")])
@pytest.mark.parametrize(("resize", "side", "step"), [(256, 224, 5), (448, 384, 9)])
def test_training_crops_equal_the_originals(goldens, crop, original, resize, side, step):
    """Two windows of four images each, drawn and cut by big_vision in TensorFlow, thinned; one level is allowed."""
    expected = np.load(goldens / "training" / "preprocessing.npz")
    transform = TrainTransform((side, side), crop=crop, resize=(resize, resize), flip=False)
    for image in range(4):
        for window in range(2):
            name = f"image{image}/{original}_{resize}_{side}/{window}"
            rng = HeldDraws(*expected[f"{name}/window"][:2].tolist())
            picture = Image.fromarray(expected[f"image{image}"])
            crop = transform.draw_crop(picture.height, picture.width, rng)  # pyright: ignore[reportArgumentType]
            ours = transform.resized_crop(picture, crop)
            difference = np.asarray(ours)[::step, ::step].astype(int) - expected[name]
            assert np.abs(difference).max() <= (0 if crop == "resmall" else 1), name


def operate(name: str, image: Image.Image, level: float, rng=None) -> Image.Image:
    return apply(image, draw(NAMES.index(name), (image.height, image.width), rng), level)


def augment(name: str, image: np.ndarray, magnitude: float, rng=None) -> np.ndarray:
    return np.asarray(operate(name, Image.fromarray(image), magnitude / 10, rng)).astype(int)


@pytest.fixture(scope="module")
def randaugmented(goldens):
    """Outputs of big_vision's RandAugment in TensorFlow on a gradient and on noise."""
    return np.load(goldens / "training" / "randaugment.npz")


MOVES = ("Rotate", "ShearX", "ShearY", "TranslateX", "TranslateY")
PLAIN = ("AutoContrast", "Equalize", "Invert")
STRONG = ("Posterize", "Solarize", "SolarizeAdd", "Color", "Contrast", "Brightness", "Sharpness")


@pytest.mark.parametrize("name", [*PLAIN, *STRONG, *MOVES])
@pytest.mark.parametrize("pictures", ["a gradient and noise", "photographs"])
def test_randaugment_equals_the_original(name, pictures, request):
    """TensorFlow's, except for the differences in the goldens' README; the photographs are not part of the project."""
    if pictures == "photographs":
        arrays = np.load(request.getfixturevalue("shared") / "goldens" / "training" / "randaugment_photos.npz")
    else:
        arrays = request.getfixturevalue("randaugmented")
    keys = [key for key in arrays.files if key.split("/")[0] == name]
    assert len(keys) == (1 if name in PLAIN else 9 if name in STRONG else 22 if "Translate" in name else 18)
    for key in keys:
        magnitude, sign = (*key.split("/")[1:], "10", "plus")[:2] if name in MOVES else ((*key.split("/"), "10")[1], "")
        ours = np.stack([augment(name, image, int(magnitude), HeldDraws(sign=sign)) for image in arrays["images"]])
        difference = np.abs(ours - arrays[key])
        if name == "Sharpness":  # the image it blends with has a level more here and there
            assert difference.max() <= max(1, math.ceil(abs(0.18 * int(magnitude) + 0.1 - 1))), key
            assert (difference > 0).mean() < 0.01, key
        elif name in MOVES:
            assert not difference[:, ~in_the_middle(name, int(magnitude), sign, ours.shape[1:3])].any(), key
        else:
            assert not difference.any(), key


def in_the_middle(name: str, magnitude: int, sign: str, size: tuple[int, int]) -> np.ndarray:
    """Mask (height, width) of coordinates of Rotate and Shear within 1e-3 of the middle between two pixels."""
    height, width = size
    y, x = np.mgrid[:height, :width].astype(float)
    amount = magnitude / 10 * (1 if sign == "plus" else -1)
    if name == "Rotate":
        angle, x, y = math.radians(30 * amount), x - (width - 1) / 2, y - (height - 1) / 2
        x, y = (
            math.cos(angle) * x - math.sin(angle) * y + (width - 1) / 2,
            math.sin(angle) * x + math.cos(angle) * y + (height - 1) / 2,
        )
    x, y = x + (name == "ShearX") * 0.3 * amount * y, y + (name == "ShearY") * 0.3 * amount * x
    return (np.abs(x % 1 - 0.5) < 1e-3) | (np.abs(y % 1 - 0.5) < 1e-3)


def test_cutout_equals_the_original(randaugmented):
    keys = [key for key in randaugmented.files if key.startswith("Cutout/") and not key.endswith("box")]
    assert len(keys) == 13
    for key in keys:
        _, magnitude, center = key.split("/")
        y, x = map(int, center.split("_"))
        ours = augment("Cutout", randaugmented["cutout_image"], int(magnitude), HeldDraws(x, y))
        assert np.array_equal(ours, randaugmented[key]), key


def test_contrast_at_all_sizes_equals_the_original(randaugmented):
    """It blends with a gray of the number of pixels over 256, at most 255: 196 at 224 x 224."""
    keys = [key for key in randaugmented.files if key.startswith("contrast_sizes/")]
    assert len(keys) == 6
    for key in keys:
        _, size, magnitude = key.split("/")
        height, width = map(int, size.split("x"))
        y, x = np.mgrid[:height, :width]
        image = [x * 255 // (width - 1), y * 255 // (height - 1), (x + y) * 255 // (width + height - 2)]
        ours = augment("Contrast", np.stack(image, axis=-1).astype(np.uint8), int(magnitude))
        assert np.array_equal(ours[::7, ::5], randaugmented[key]), key


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("size", [(16, 16), (1, 1), (2, 5), (5, 2), (1, 9)])
def test_every_operation_keeps_size_and_mode(size, mode):
    ramp = Image.fromarray(np.arange(256, dtype=np.uint8).reshape(16, 16))
    image = ramp.resize(size).convert(mode)
    for name in NAMES:
        for level in (0, 0.5, 1, 1.5, 2):
            result = operate(name, image, level, np.random.default_rng(1))
            assert (result.size, result.mode) == (size, mode), name


@pytest.mark.parametrize("name", MOVES)
def test_gray_images_are_moved_like_color_channels(name):
    color = np.random.default_rng(0).integers(0, 256, (21, 34, 3), dtype=np.uint8)
    moved = augment(name, color, 3, HeldDraws(sign="minus"))
    assert np.array_equal(augment(name, color[..., 1], 3, HeldDraws(sign="minus")), moved[..., 1])
