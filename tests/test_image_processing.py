"""The image processor against TensorFlow's own outputs, from every kind of input, and at home in transformers."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor, ViTConfig, ViTForImageClassification, pipeline

from hf_vit.configuration_hf_vit import HfViTConfig
from hf_vit.image_processing_hf_vit import HfViTImageProcessor
from hf_vit.image_reading import ImageReadingError

GOLDENS = np.load(Path(__file__).parent / "goldens" / "preprocess.npz")


@pytest.fixture(scope="module", autouse=True)
def _registered():
    classes = {"pil": HfViTImageProcessor, "torchvision": HfViTImageProcessor}
    AutoImageProcessor.register(HfViTConfig, image_processor_classes=classes, exist_ok=True)


@pytest.fixture
def pixels():
    return np.random.default_rng(5).integers(0, 256, (37, 53, 3), dtype=np.uint8)


def channels_last(pixel_values):
    return pixel_values[0].permute(1, 2, 0).numpy()


def golden_runs(kind):
    return [key for key in GOLDENS.files if key.startswith("image") and key.split("/")[1:2] == [kind]]


@pytest.mark.parametrize("key", golden_runs("eval"))
def test_vit_jax_equals_tensorflow(key):
    image, _, side = key.split("/")
    result = HfViTImageProcessor(size=int(side))(GOLDENS[image], return_tensors="pt")
    np.testing.assert_allclose(channels_last(result.pixel_values), GOLDENS[key], atol=1e-6, rtol=0)


def test_same_numbers_from_every_kind_of_input(pixels, tmp_path):
    picture = Image.fromarray(pixels)
    picture.save(tmp_path / "picture.png")
    processor = HfViTImageProcessor(size={"height": 20, "width": 36})
    expected = processor(pixels, return_tensors="pt").pixel_values
    assert expected.shape == (1, 3, 20, 36)
    assert expected.dtype == torch.float32
    kinds = {
        "path": tmp_path / "picture.png",
        "string": str(tmp_path / "picture.png"),
        "bytes": (tmp_path / "picture.png").read_bytes(),
        "pillow": picture,
        "array, channels first": pixels.transpose(2, 0, 1),
        "tensor": torch.from_numpy(pixels).permute(2, 0, 1).contiguous(),
        "tensor, channels last": torch.from_numpy(pixels),
        "batched tensor": torch.from_numpy(pixels).permute(2, 0, 1)[None],
        "floats": pixels.astype(np.float32) / 255,
    }
    for kind, image in kinds.items():
        result = processor(image, return_tensors="pt").pixel_values
        torch.testing.assert_close(result, expected, atol=1e-6, rtol=0, msg=kind)


def test_reloads_through_the_auto_class_with_the_same_numbers(pixels, tmp_path):
    processor = HfViTImageProcessor(size={"height": 20, "width": 36}, image_std=[0.25, 0.5, 0.75])
    processor.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "preprocessor_config.json").read_text())
    assert saved["image_std"] == [0.25, 0.5, 0.75]
    assert saved["preset"] == "vit_jax"
    assert saved["antialias"] is False
    reloaded = AutoImageProcessor.from_pretrained(tmp_path)
    assert type(reloaded) is HfViTImageProcessor
    assert reloaded.to_dict() == processor.to_dict()
    expected = processor(pixels, return_tensors="np").pixel_values
    np.testing.assert_array_equal(reloaded(pixels, return_tensors="np").pixel_values, expected)


def test_works_in_a_pipeline(pixels, tmp_path):
    sizes = {"hidden_size": 14, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 22}
    model = ViTForImageClassification(ViTConfig(**sizes, image_size=20, patch_size=10, num_labels=11)).eval()
    processor = HfViTImageProcessor(size=20)
    Image.fromarray(pixels).save(tmp_path / "picture.png")
    answer = pipeline("image-classification", model=model, image_processor=processor)(str(tmp_path / "picture.png"))
    with torch.no_grad():
        scores = model(**processor(pixels, return_tensors="pt")).logits.softmax(-1)[0].sort(descending=True).values
    assert [entry["score"] for entry in answer] == pytest.approx(scores[:5].tolist(), abs=1e-6)


def test_an_unreadable_image_is_named(tmp_path):
    path = tmp_path / "letter.jpg"
    path.write_text("Dear Sir or Madam,")
    with pytest.raises(ImageReadingError, match=r"letter\.jpg is not an image"):
        HfViTImageProcessor()(path)
    with pytest.raises(ImageReadingError, match=r"nowhere\.jpg cannot be read: .*No such file"):
        HfViTImageProcessor()(str(tmp_path / "nowhere.jpg"))
    with pytest.raises(ImageReadingError, match="image 1 has values from 0 to 300"):
        HfViTImageProcessor()([np.zeros((4, 5, 3)), np.array([[0, 300]])])


def test_an_unknown_argument_is_refused():
    with pytest.raises(ValueError, match="does not know do_normalise"):
        HfViTImageProcessor(do_normalise=False)
    with pytest.raises(ValueError, match="preset is 'vit'; it must be one of vit_jax"):
        HfViTImageProcessor("vit")
