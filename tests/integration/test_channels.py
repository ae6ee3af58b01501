"""Images with any number of channels: adapted kernels, files, training and prediction."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModel

import hf_vit
from hf_vit.data.augmentation import ArrayTransform, TrainTransform
from hf_vit.data.loaders import channel_statistics
from hf_vit.data.splits import open_named
from hf_vit.files.pictures import read_for_display
from hf_vit.models.image_reading import ImageReadingError, load_image, read_image
from hf_vit.settings.fields import EvaluateSettings

from ..photographs import encode
from ..tiny_models import save_tiny, tiny, tiny_bit

MODELS = {"vit": tiny, "hybrid": lambda: tiny(hybrid=True), "bit": tiny_bit}


def first_kernel(model) -> torch.Tensor:
    return next(module.weight for module in model.modules() if isinstance(module, torch.nn.Conv2d)).detach()


def adapted(kernel: np.ndarray, channels: int) -> np.ndarray:
    """timm's `adapt_input_conv`, channel by channel."""
    if channels == 1:
        return kernel.sum(axis=1, keepdims=True)
    old = kernel.shape[1]
    return np.stack([kernel[:, channel % old] * old / channels for channel in range(channels)], axis=1)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("channels", [1, 2, 5, 13])
def test_kernels_are_adapted_as_in_timm(kind, channels, tmp_path):
    model = MODELS[kind]()
    model.save_pretrained(tmp_path / "colors")
    loaded = type(model).from_pretrained(tmp_path / "colors", num_channels=channels)
    expected = adapted(first_kernel(model).numpy(), channels)
    np.testing.assert_allclose(first_kernel(loaded).numpy(), expected, rtol=1e-6, atol=1e-7)
    loaded.save_pretrained(tmp_path / "bands")
    again = type(model).from_pretrained(tmp_path / "bands")
    assert again.config.num_channels == channels
    pixels = torch.randn(2, channels, *model.config.image_size)
    assert torch.equal(again(pixels).logits, loaded(pixels).logits)


def test_adaptation_equals_timm():
    timm_models = pytest.importorskip("timm.models")
    kernel = torch.randn(7, 3, 5, 4)
    for channels in (1, 2, 4, 13):
        expected = timm_models.adapt_input_conv(channels, kernel).numpy()
        np.testing.assert_allclose(expected, adapted(kernel.numpy(), channels), rtol=1e-6)


def test_auto_classes_and_load(tmp_path):
    tiny().save_pretrained(tmp_path)
    hf_vit.HfViTImageProcessor(size=[20, 36], image_mean=[0.1, 0.2, 0.3]).save_pretrained(tmp_path)
    assert AutoModel.from_pretrained(tmp_path, num_channels=4)(torch.randn(1, 4, 20, 36)).pooler_output.shape == (1, 14)
    model, processor = hf_vit.load(tmp_path, num_channels=5)
    assert processor.image_mean == [0.1, 0.2, 0.3, 0.1, 0.2]
    pixels = processor(np.zeros((30, 20, 5), np.uint8), return_tensors="pt").pixel_values
    assert model(pixels).logits.isfinite().all()
    with pytest.raises(ValueError, match="num_channels"):
        hf_vit.load(tmp_path, num_channels=0)


def test_a_model_that_predicts_pixels_keeps_its_channels(tmp_path):
    hf_vit.HfViTForMaskedPatchPrediction(tiny().config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="num_channels"):
        hf_vit.HfViTForMaskedPatchPrediction.from_pretrained(tmp_path, num_channels=4)


@pytest.fixture
def levels() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (7, 9, 6), dtype=np.uint8)


def save_pages(file, levels: np.ndarray) -> None:
    """Write a TIFF with a page for each channel."""
    first, *others = (Image.fromarray(page) for page in np.moveaxis(levels, -1, 0))
    first.save(file, save_all=True, append_images=others)


def test_files_of_any_number_of_channels(levels, tmp_path):
    np.save(tmp_path / "last.npy", levels)
    np.save(tmp_path / "first.npy", levels.transpose(2, 0, 1))
    save_pages(tmp_path / "pages.tif", levels)
    save_pages(tmp_path / "deep.tif", levels.astype(np.uint16) * 257)
    files = [str(tmp_path / f"{channel}.png") for channel in range(6)]
    for channel, file in enumerate(files):
        Image.fromarray(levels[..., channel]).save(file)
    content = (tmp_path / "last.npy").read_bytes()
    images = [str(tmp_path / name) for name in ("last.npy", "first.npy", "pages.tif", "deep.tif")]
    for image in (*images, {"channels": files}, content, {"bytes": content, "path": None}):
        read = read_image(image, 6).permute(1, 2, 0).numpy()
        np.testing.assert_array_equal(read, levels, str(image)[:50])


def test_pictures_of_arrays_show_three_channels(levels, tmp_path):
    np.save(tmp_path / "six.npy", levels)
    np.save(tmp_path / "two.npy", levels[..., :2].transpose(2, 0, 1))
    np.testing.assert_array_equal(np.asarray(read_for_display(str(tmp_path / "six.npy"), 8)), levels[..., :3])
    first = np.repeat(levels[..., :1], 3, axis=2)
    np.testing.assert_array_equal(np.asarray(read_for_display(str(tmp_path / "two.npy"), 8)), first)


def test_files_that_do_not_fit_are_refused(levels, tmp_path):
    np.save(tmp_path / "array.npy", levels)
    (tmp_path / "cut.npy").write_bytes((tmp_path / "array.npy").read_bytes()[:100])
    np.save(tmp_path / "objects.npy", np.array([{}], dtype=object), allow_pickle=True)
    save_pages(tmp_path / "pages.tif", levels)
    for name, channels in (("array.npy", 5), ("cut.npy", 6), ("objects.npy", 6), ("pages.tif", 5)):
        with pytest.raises(ImageReadingError, match=name):
            read_image(str(tmp_path / name), channels, name=name)
    with pytest.raises(ImageReadingError, match="--num-channels"):
        load_image(str(tmp_path / "array.npy"))
    Image.new("L", (3, 3)).save(tmp_path / "small.png")
    Image.new("L", (9, 7)).save(tmp_path / "large.png")
    with pytest.raises(ImageReadingError):
        read_image({"channels": [str(tmp_path / "small.png"), str(tmp_path / "large.png")]}, 2)


CROPS = {"inception": {}, "none": {}, "random": {"resize": (20, 24)}, "resmall": {"resize": (18, 18)}}


@pytest.mark.parametrize("crop", CROPS)
def test_arrays_are_augmented_as_color_images(crop):
    image = Image.fromarray(np.random.default_rng(1).integers(0, 256, (23, 31, 3), dtype=np.uint8))
    options = {"size": (12, 16), "crop": crop, **CROPS[crop]}
    colors, arrays = TrainTransform(**options), ArrayTransform(**options, num_channels=3)
    for seed in range(8):
        expected = colors.sample(image, np.random.default_rng(seed))["image"].astype(int)
        ours = arrays.load({"bytes": encode(image), "path": None}, np.random.default_rng(seed))["image"].astype(int)
        assert np.abs(ours - expected).max() <= 1
        assert (ours != expected).mean() < 0.05


@pytest.fixture
def bands(tmp_path):
    """Images of five bands, one of which is brighter in each class."""
    rng = np.random.default_rng(0)
    for split, count in (("train", 12), ("test", 4)):
        for number in range(3):
            folder = tmp_path / "data" / split / f"class{number}"
            folder.mkdir(parents=True)
            for index in range(count):
                image = rng.integers(0, 120, (20, 24, 5), dtype=np.uint8)
                image[..., 2 + number] += 90
                np.save(folder / f"{index:02}.npy", image)
    return tmp_path / "data"


def test_statistics_are_those_of_all_pixels(bands):
    split = open_named(EvaluateSettings(model="none", dataset=str(bands)), "train")
    mean, std = channel_statistics(split, 5)
    pixels = np.stack([np.load(file) for file in sorted(bands.glob("train/*/*.npy"))]).reshape(-1, 5) / 255
    np.testing.assert_allclose(mean, pixels.mean(axis=0), rtol=1e-6)
    np.testing.assert_allclose(std, pixels.std(axis=0), rtol=1e-5)


def test_training_on_five_bands(bands, tmp_path, fresh_accelerator, blank_figures):
    model = save_tiny(tmp_path / "model", image_size=(16, 16), patch_size=8)
    settings = {"steps": 40, "warmup_steps": 4, "eval_every": 40, "batch_size": 24, "optimizer": "adamw"}
    settings |= {"learning_rate": 0.005, "num_workers": 0, "report_to": "none", "num_channels": 5}
    metrics = hf_vit.finetune(model, bands, tmp_path / "out", **settings)
    assert metrics["accuracy"] == 1.0
    assert len(json.loads((tmp_path / "out" / "preprocessor_config.json").read_text())["image_std"]) == 5
    files = sorted((bands / "test").glob("*/*.npy"))
    for file, (best, *_) in zip(files, hf_vit.predict(str(tmp_path / "out"), files), strict=True):
        assert best.label == file.parent.name
    few = settings | {"steps": 1, "warmup_steps": 0}
    hf_vit.finetune(tmp_path / "out", bands, tmp_path / "theirs", **few, save_for="transformers")
    assert json.loads((tmp_path / "theirs" / "config.json").read_text())["model_type"] == "vit"
    with pytest.raises(ValueError, match="randaugment"):
        hf_vit.finetune(model, bands, tmp_path / "no", **settings, randaugment_layers=2)
    (bands / "train" / "class1" / "copy.npy").write_bytes((bands / "test" / "class1" / "00.npy").read_bytes())
    issues = hf_vit.audit(tmp_path / "out", bands, num_workers=0)
    assert [(one.image, one.other) for one in issues if one.issue == "leak"] == [
        ("train/class1/copy.npy", "test/class1/00.npy")
    ]
