"""Augmentation against arrays and crops of the original (TensorFlow)."""

import numpy as np
import pytest
from PIL import Image
from scipy.stats import ks_2samp

from hf_vit.training.augmentation import (
    Box,
    TrainTransform,
    crop_and_resize,
    sample_generator,
    sample_inception_box,
    to_mode,
)
from hf_vit.training.randaugment import OPERATIONS, contrast, posterize, randaugment, solarize, solarize_add


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
    """1,000 boxes that TensorFlow drew for a 240 x 320 image, area 5-100 %, ratio 3/4-4/3."""
    theirs = preprocess["boxes/240x320"]
    rng = np.random.default_rng(5)
    ours = np.array([sample_inception_box(240, 320, ratio=(3 / 4, 4 / 3), rng=rng) for _ in range(4000)])
    for column in range(4):
        assert ks_2samp(theirs[:, column], ours[:, column]).pvalue > 0.01
    assert ks_2samp(theirs[:, 2] * theirs[:, 3], ours[:, 2] * ours[:, 3]).pvalue > 0.01
    assert ks_2samp(theirs[:, 3] / theirs[:, 2], ours[:, 3] / ours[:, 2]).pvalue > 0.01


@pytest.mark.parametrize(("height", "width"), [(7, 300), (300, 7), (1, 1), (31, 47)])
def test_boxes_lie_inside_any_image(height, width):
    rng = np.random.default_rng(0)
    for _ in range(200):
        box = sample_inception_box(height, width, rng=rng)
        assert box.top >= 0
        assert box.top + box.height <= height
        assert box.left >= 0
        assert box.left + box.width <= width
        assert box.height > 0
        assert box.width > 0


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


def test_random_crop_cuts_a_window_of_the_resized_image():
    image = Image.fromarray(np.arange(48, dtype=np.uint8).reshape(6, 8))
    transform = TrainTransform((4, 5), crop="random", resize=(6, 7), flip=False, mode="L")
    resized = np.asarray(crop_and_resize(image, Box(0, 0, 6, 8), (6, 7)))
    window = transform(image, sample_generator(0, 0, 0))[..., 0]
    windows = [resized[top : top + 4, left : left + 5] for top in range(3) for left in range(3)]
    assert any(np.array_equal(window, candidate) for candidate in windows)


class HeldDraws:
    """A generator of random numbers whose draws are given."""

    def __init__(self, *draws: int):
        self.draws = list(draws)

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
            ours = transform.cut(Image.fromarray(expected[f"image{image}"]), rng)  # pyright: ignore[reportArgumentType]
            difference = np.asarray(ours)[::step, ::step].astype(int) - expected[name]
            assert np.abs(difference).max() <= (0 if crop == "resmall" else 1), name


def test_resmall_crop_takes_a_grey_image():
    image = Image.fromarray(np.arange(48, dtype=np.uint8).reshape(6, 8))
    transform = TrainTransform((4, 5), crop="resmall", resize=(6, 6), flip=False, mode="L")
    window = transform(image, sample_generator(0, 0, 0))[..., 0]
    windows = [np.asarray(image)[top : top + 4, left : left + 5] for top in range(3) for left in range(4)]
    assert any(np.array_equal(window, candidate) for candidate in windows)


def test_sixteen_bit_grey_is_scaled_not_cut_off():
    image = Image.fromarray(np.array([[0, 65535], [256, 32768]], np.uint16))
    assert np.array_equal(np.asarray(to_mode(image, "L")), [[0, 255], [1, 128]])


def ramp() -> Image.Image:
    return Image.fromarray(np.stack([np.arange(256, dtype=np.uint8).reshape(16, 16)] * 3, axis=-1))


def test_tables_of_the_original():
    """At strength 10 and 4; `image < threshold` and the shifts of big_vision's autoaugment.py by hand."""
    values = np.arange(256)
    table = {operation: np.asarray(operation(ramp(), 0.4, None))[..., 0].ravel() for operation in
             (posterize, solarize, solarize_add)}  # fmt: skip
    assert np.array_equal(table[posterize], values >> 7 << 7)  # int(0.4 * 4) = 1 bit
    assert np.array_equal(table[solarize], np.where(values < 102, values, 255 - values))
    assert np.array_equal(table[solarize_add], np.where(values < 128, np.minimum(values + 44, 255), values))
    assert np.array_equal(np.asarray(solarize(ramp(), 1.0, None))[..., 0].ravel(), values)  # nothing is inverted


def test_contrast_blends_with_the_number_of_pixels_over_256():
    image = Image.new("RGB", (224, 224), (10, 20, 30))
    assert contrast(image, 0.0, None).getpixel((0, 0)) == (177, 178, 179)  # 196 + 0.1 * (value - 196), cut off


def test_strength_zero_is_not_the_identity_for_all():
    """`light1` of AugReg has magnitude 0: colours still fade to a tenth, as in the original."""
    rng = np.random.default_rng(0)
    pixel = OPERATIONS[8](Image.new("RGB", (4, 4), (200, 100, 50)), 0.0, rng).getpixel((0, 0))  # brightness
    assert pixel == (20, 10, 5)


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_every_operation_keeps_size_and_mode(mode):
    image = ramp().convert(mode)
    for operation in OPERATIONS:
        for level in (0, 0.5, 1, 2):
            result = operation(image, level, np.random.default_rng(1))
            assert (result.size, result.mode) == (image.size, mode), operation.__name__


def test_moved_images_are_filled_with_grey():
    image = Image.new("RGB", (50, 50), (255, 0, 0))
    names = {operation.__name__: operation for operation in OPERATIONS}
    for name in ("translate_x", "translate_y", "rotate", "shear_x", "shear_y"):
        colours = {colour for _, colour in names[name](image, 0.3, np.random.default_rng(2)).getcolors()}
        assert colours == {(255, 0, 0), (128, 128, 128)}, name


def test_translation_moves_whole_pixels():
    image = ramp()
    names = {operation.__name__: operation for operation in OPERATIONS}
    moved = np.asarray(names["translate_x"](image, 0.03, np.random.default_rng(0)))[..., 0]
    original = np.asarray(image)[..., 0]
    left, right = np.array_equal(moved[:, :-3], original[:, 3:]), np.array_equal(moved[:, 3:], original[:, :-3])
    assert left or right


def test_operations_are_drawn_evenly():
    rng = np.random.default_rng(0)
    counts = np.bincount([int(rng.integers(len(OPERATIONS))) for _ in range(16_000)], minlength=16)
    assert len(OPERATIONS) == 16
    assert counts.min() > 900
    assert randaugment(ramp(), 2, 10, rng).size == (16, 16)
