"""The image processor, compared with TensorFlow for every kind of input; conventions of transformers."""

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from hf_vit.models.image_processing_hf_vit import PRESETS, HfViTImageProcessor
from hf_vit.models.image_reading import ImageReadingError

from ..paths import GOLDENS

TENSORFLOW_PIXELS = np.load(GOLDENS / "preprocess.npz")
EVALUATED = np.load(GOLDENS / "training" / "preprocessing.npz")  # by big_vision; every 5th (224) or 9th (384) pixel


def random_pixels(*shape, channels=3):
    return np.random.default_rng(5).integers(0, 256, (*shape, channels), dtype=np.uint8)


@pytest.fixture
def pixels():
    return random_pixels(37, 53)


def process(images, processor=None, **changes):
    return (processor or HfViTImageProcessor())(images, return_tensors="pt", **changes).pixel_values


GOLDEN_SETTINGS = {
    "eval": lambda side: {"preset": "vit_jax", "size": side},
    "lit": lambda side: {"preset": "lit", "size": side},
    "bv_eval": lambda side: {"preset": "big_vision", "size": {"shortest_edge": side}, "crop_size": side},
}


@pytest.mark.parametrize("kind", GOLDEN_SETTINGS)
@pytest.mark.parametrize("backend", ["pillow", "torch"])
def test_pixel_values_equal_the_original(kind, backend):
    keys = [key for key in TENSORFLOW_PIXELS.files if f"/{kind}/" in key]
    assert len(keys) == 6
    for key in keys:
        image, _, side = key.split("/")
        result = process(TENSORFLOW_PIXELS[image], backend=backend, **GOLDEN_SETTINGS[kind](int(side)))
        np.testing.assert_allclose(result[0].permute(1, 2, 0), TENSORFLOW_PIXELS[key], atol=1e-6, rtol=0, err_msg=key)


@pytest.mark.parametrize("backend", ["pillow", "torch"])
@pytest.mark.parametrize(("resized", "side", "step"), [(256, 224, 5), (448, 384, 9)])
def test_evaluation_equals_augreg(backend, resized, side, step):
    """`resize_small(256)|central_crop(224)|value_range(-1, 1)`, and 448 with 384."""
    for number in range(4):
        run = f"image{number}/eval_{resized}_{side}"
        result = process(EVALUATED[f"image{number}"], preset="augreg", size=side, backend=backend)[0].double()
        levels = ((result + 1) * 127.5).round().permute(1, 2, 0)[::step, ::step]
        assert np.array_equal(levels, EVALUATED[f"{run}/uint8"]), run
        np.testing.assert_allclose(result.mean((1, 2)), EVALUATED[f"{run}/mean"], rtol=0, atol=1e-6)


def test_pixel_values_equal_transformers(pixels):
    images = [Image.fromarray(pixels), Image.fromarray(random_pixels(211, 90))]
    expected = ViTImageProcessorPil(size={"height": 20, "width": 36})(images, return_tensors="pt").pixel_values
    result = process(images, preset="transformers", size=(20, 36))
    torch.testing.assert_close(result, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("shape", [(1, 1), (1, 40), (40, 1), (2, 3), (37, 53), (190, 75), (3, 3)])
def test_every_type_of_input_gives_equal_pixel_values(preset, shape, tmp_path):
    pixels, path = random_pixels(*shape), tmp_path / "picture.png"
    picture, tensor = Image.fromarray(pixels), torch.from_numpy(pixels).permute(2, 0, 1).contiguous()
    picture.save(path)
    kinds = {
        "path": path,
        "string": str(path),
        "bytes": path.read_bytes(),
        "array": pixels,
        "array, channels first": tensor.numpy(),
        "array of floats": pixels / 255,
        "tensor": tensor,
        "tensor, channels last": torch.from_numpy(pixels),
        "tensor of floats": tensor / 255,
        "batch": torch.stack([tensor]),
        "batch of arrays": pixels[None],
        "list": [tensor],
        "nested list": [[picture]],
    }
    processor = HfViTImageProcessor(preset, size=(20, 36), patch_size=4)
    expected = process(picture, processor)
    for kind, image in kinds.items():
        data_format = {"array, channels first": "channels_first", "tensor, channels last": "channels_last"}.get(kind)
        for backend in ("auto", "pillow", "torch"):
            result = process(image, processor, backend=backend, input_data_format=data_format)
            torch.testing.assert_close(result, expected, atol=1e-6, rtol=0, msg=f"{kind}, {backend}")


@pytest.mark.parametrize(("preset", "height", "width"), [("vit_jax", 3000, 4000), ("timm", 1500, 2000)])
def test_large_photographs(preset, height, width):
    rows, columns = np.arange(height, dtype=np.uint32)[:, None], np.arange(width, dtype=np.uint32)
    pixels = ((rows * columns)[..., None] >> np.array([4, 6, 9])).astype(np.uint8)
    expected = process(Image.fromarray(pixels), preset=preset, size=30)
    result = process(torch.from_numpy(pixels), preset=preset, size=30)
    torch.testing.assert_close(result, expected, atol=1e-6, rtol=0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("preset", PRESETS)
def test_results_on_a_gpu_are_equal(preset):
    processor = HfViTImageProcessor(preset)
    batch = torch.from_numpy(random_pixels(5, 375, 500)).permute(0, 3, 1, 2)
    expected = process(batch, processor)
    for images in (batch.cuda(), list(batch.cuda())):
        result = process(images, processor)
        assert result.is_cuda
        torch.testing.assert_close(result.cpu(), expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(process(list(batch), processor, device="cuda").cpu(), expected, atol=1e-6, rtol=0)


def test_images_with_other_numbers_of_channels():
    gray = random_pixels(9, 7, channels=1)
    torch.testing.assert_close(process(gray), process(np.repeat(gray, 3, -1)))
    assert process(gray, num_channels=1).shape == (1, 1, 224, 224)
    five = random_pixels(37, 53, channels=5)
    assert process(five, num_channels=5).shape == (1, 5, 224, 224)
    rgba = random_pixels(37, 53, channels=4)
    assert process(rgba, image_mean=[0.0] * 4, image_std=[1.0] * 4).shape == (1, 4, 224, 224)
    assert process(rgba, image_mean=0.0, image_std=1.0).shape == (1, 4, 224, 224)
    assert process(gray, do_convert_rgb=False, image_mean=0.5, image_std=0.5).shape == (1, 1, 224, 224)
    with pytest.raises(ImageReadingError, match="image_mean"):
        process(rgba, do_convert_rgb=False)


def test_steps_can_be_switched_off(pixels):
    tensor = torch.from_numpy(pixels).permute(2, 0, 1).float()[None]
    off = {"do_resize": False, "do_rescale": False, "do_normalize": False}
    torch.testing.assert_close(process(pixels, **off), tensor)
    torch.testing.assert_close(process(pixels, **off | {"do_rescale": True}), tensor / 255)
    torch.testing.assert_close(process(pixels, **off | {"do_rescale": True}, rescale_factor=0.5), tensor / 2)
    normalized = process(pixels, **off | {"do_normalize": True}, image_mean=[1, 2, 3], image_std=[4, 5, 6])
    expected = (tensor[0] - torch.tensor([1, 2, 3])[:, None, None]) / torch.tensor([4, 5, 6])[:, None, None]
    torch.testing.assert_close(normalized[0], expected)


def test_a_crop_without_a_resize(pixels):
    result = process(pixels, do_resize=False, do_center_crop=True, crop_size=(30, 60), do_normalize=False)
    expected = np.pad(pixels[3:33], ((0, 0), (3, 4), (0, 0))).transpose(2, 0, 1)
    torch.testing.assert_close(result[0], torch.from_numpy(expected) / 255)


def test_floats_keep_their_values_without_rescaling():
    image = np.random.default_rng(1).standard_normal((3, 20, 36))
    for preset in ("vit_jax", "lit", "transformers"):
        result = process(image, preset=preset, size=(20, 36), do_rescale=False, do_normalize=False)
        torch.testing.assert_close(result[0], torch.from_numpy(image).float(), atol=1e-6, rtol=0)


def test_types_and_layouts_of_the_result(pixels):
    images = [pixels, pixels[::-1]]
    batch, processor = process(images), HfViTImageProcessor()
    assert (batch.is_contiguous(), batch.dtype) == (True, torch.float32)
    np.testing.assert_array_equal(processor(images, return_tensors="np").pixel_values, batch)
    np.testing.assert_array_equal(processor(images).pixel_values, batch)
    last = processor(images, return_tensors="pt", data_format="channels_last").pixel_values
    torch.testing.assert_close(last, batch.permute(0, 2, 3, 1))
    different = [pixels, pixels[1:]]
    assert len(processor(different, do_resize=False).pixel_values) == 2
    with pytest.raises(ValueError, match="3, 37, 53"):
        process(different, do_resize=False)


def test_reduced_decoding(tmp_path):
    pixels = np.kron(random_pixels(30, 40), np.ones((16, 16, 1), dtype=np.uint8))  # 480 x 640
    Image.fromarray(pixels).save(tmp_path / "large.jpg")
    exact = process(tmp_path / "large.jpg", preset="transformers", size=60)
    reduced = process(tmp_path / "large.jpg", preset="transformers", size=60, reduced_decoding=True)
    assert not torch.equal(reduced, exact)
    assert (reduced - exact).abs().mean() < 0.1
    for image in (pixels, Image.fromarray(pixels)):  # decoded already
        assert torch.equal(process(image, size=60, reduced_decoding=True), process(image, size=60))


def test_an_unreadable_image_is_named(tmp_path):
    path = tmp_path / "letter.jpg"
    path.write_text("Dear Sir or Madam,")
    for image in (path, str(path), {"path": str(path), "bytes": b"Dear"}):
        with pytest.raises(ImageReadingError, match=r"letter\.jpg"):
            HfViTImageProcessor()(image)
    with pytest.raises(ImageReadingError, match="300"):
        HfViTImageProcessor()([np.zeros((4, 5, 3)), np.array([[0, 300]])])


def test_unreadable_images_can_be_skipped(pixels, tmp_path):
    (tmp_path / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    images = [tmp_path / "broken.png", pixels, np.full((4, 5, 3), 2.0), pixels[::-1]]
    features = HfViTImageProcessor(on_error="skip")(images, return_tensors="pt")
    assert (features.skipped, list(features)) == ([0, 2], ["pixel_values"])  # so that model(**features) works
    torch.testing.assert_close(features.pixel_values, process([pixels, pixels[::-1]]))
    assert HfViTImageProcessor()(pixels).skipped == []
    with pytest.raises(ImageReadingError, match=r"broken\.png"):
        HfViTImageProcessor()(images[:1], on_error="skip")


def test_an_unknown_argument_is_refused(pixels, tmp_path):
    with pytest.raises(ValueError, match="do_normalise"):
        HfViTImageProcessor(do_normalise=False)
    HfViTImageProcessor().save_pretrained(tmp_path)
    for load in (HfViTImageProcessor.from_pretrained, AutoImageProcessor.from_pretrained):
        with pytest.raises(ValueError, match="imag_mean"):
            load(tmp_path, imag_mean=0.5)
    wrong = {"do_normalise": False, "return_tensors": "tf", "data_format": "last", "do_resize": "yes"}
    for name, value in wrong.items():
        with pytest.raises(TypeError if name == "do_normalise" else ValueError, match=name):
            HfViTImageProcessor()(pixels, **{name: value})


@pytest.mark.parametrize("preset", PRESETS)
def test_saves_every_number_and_reloads(preset, pixels, tmp_path):
    processor = HfViTImageProcessor(preset, size=(48, 32), image_std=[0.25, 0.5, 0.75], patch_size=[8, 4])
    (saved,) = processor.save_pretrained(tmp_path)
    settings = json.loads(Path(saved).read_text())
    assert (settings["image_std"], settings["preset"]) == ([0.25, 0.5, 0.75], preset)
    assert {"resample", "antialias", "resize_output", "size", "rescale_factor"} <= settings.keys()
    loaders = [HfViTImageProcessor.from_pretrained, AutoImageProcessor.from_pretrained]
    loaders += [partial(AutoImageProcessor.from_pretrained, backend=name) for name in ("pil", "torchvision")]
    for load in loaders:
        reloaded = load(tmp_path)
        assert type(reloaded) is HfViTImageProcessor
        assert reloaded.to_dict() == processor.to_dict()
        torch.testing.assert_close(process(pixels, reloaded), process(pixels, processor), atol=0, rtol=0)


def test_a_setting_is_changed_at_loading(tmp_path):
    HfViTImageProcessor("augreg").save_pretrained(tmp_path)
    loaded = AutoImageProcessor.from_pretrained(tmp_path, size=384)
    assert (loaded.size, loaded.crop_size) == ({"shortest_edge": 448}, {"height": 384, "width": 384})
    loaded, unused = HfViTImageProcessor.from_pretrained(tmp_path, do_resize=False, foo=1, return_unused_kwargs=True)
    assert loaded.do_resize is False
    assert unused == {"foo": 1}


def test_processors_share_no_settings(pixels):
    first, second = HfViTImageProcessor(), HfViTImageProcessor()
    first.size["height"] = 999
    first.image_mean[0] = 0.1
    assert second.to_dict() == HfViTImageProcessor().to_dict()
    before = second.to_dict()
    process(pixels, second, preset="timm", size=20, image_mean=[0.0, 0.0, 0.0])
    assert second.to_dict() == before


def test_pixel_values_are_computed_on_the_device(pixels):
    torch.testing.assert_close(process(pixels, device="cpu"), process(pixels))
    assert process(pixels, device="meta").device.type == "meta"
    batch = random_pixels(3, 37, 53)  # an array, which is not split for an accelerator
    assert [len(process(images, device="meta")) for images in (batch, [batch[:2], batch[2]])] == [3, 3]
    with pytest.raises(ValueError, match="meta"):
        process(pixels, device="meta", backend="pillow")


def test_gradients_are_not_recorded(pixels):
    result = process(torch.from_numpy(pixels / 255).requires_grad_())
    assert not result.requires_grad
    torch.testing.assert_close(result, process(pixels))
