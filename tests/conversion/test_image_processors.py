"""Image processors of transformers: every door translates them in the same way."""

import json

import numpy as np
import pytest
import torch
import transformers

from hf_vit import HfViTImageProcessor, load
from hf_vit.conversion import convert, export
from hf_vit.conversion.image_processors import translate_processor
from hf_vit.hub.cards import Sources
from hf_vit.models.image_processing_hf_vit import output_size

from ..tiny_models import SIZES, save_tiny, tiny

SQUARE = {**SIZES, "image_size": 20, "patch_size": 4, "num_labels": 11}
PICTURE = np.random.default_rng(0).integers(0, 255, (50, 31, 3), np.uint8)
# Classes whose defaults, as transformers saves them, are a file
CLASSES = (
    "Beit Bit Blip ChineseCLIP CLIP ConvNext DeiT DPT EfficientNet Flava GLPN ImageGPT Levit MobileNetV1 MobileNetV2 "
    "MobileViT Owlv2 OwlViT Perceiver PoolFormer Pvt Segformer Siglip TextNet Vilt ViT VitMatte"
)
HALF = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
FILES = {  # of older versions, and written by hand
    "ViT, nothing": {"image_processor_type": "ViTImageProcessor"},
    "ViT, fast": {"image_processor_type": "ViTImageProcessorFast", "size": {"height": 20, "width": 20}},
    "ViT, number": {"feature_extractor_type": "ViTFeatureExtractor", "size": 20, "do_resize": True, **HALF},
    "ViT, bicubic": {"image_processor_type": "ViTImageProcessor", "resample": 3, "image_mean": [0.4, 0.5, 0.6]},
    "ViT, no resize": {"image_processor_type": "ViTImageProcessor", "do_resize": False},
    "ViT, no normalization": {"image_processor_type": "ViTImageProcessor", "do_normalize": False},
    "ViT, no rescale": {"image_processor_type": "ViTImageProcessor", "do_rescale": False, "do_normalize": False},
    "ViT, other factor": {"image_processor_type": "ViTImageProcessor", "rescale_factor": 1 / 127.5},
    "ViT, null": {"image_processor_type": "ViTImageProcessor", "image_mean": None, "size": None},
    "ViT, unused crop": {"feature_extractor_type": "ViTFeatureExtractor", "crop_size": 18, "do_center_crop": False},
    "ViT, processor class": {"image_processor_type": "ViTImageProcessor", "processor_class": "CLIPProcessor"},
    "hybrid": {"image_processor_type": "ViTHybridImageProcessor", "size": {"shortest_edge": 24}, **HALF},
    "hybrid, nothing": {"image_processor_type": "ViTHybridImageProcessor"},
    "CLIP, number": {
        "feature_extractor_type": "CLIPFeatureExtractor",
        **{"size": 24, "crop_size": 20, "do_center_crop": True, "resample": 3, **HALF},
    },
    "DeiT, numbers": {"feature_extractor_type": "DeiTFeatureExtractor", "size": 24, "crop_size": 20, **HALF},
    "Bit, crop": {
        "image_processor_type": "BitImageProcessor",
        **{"size": {"shortest_edge": 24}, "crop_size": {"height": 20, "width": 20}, "do_center_crop": True},
    },
    "Siglip, converts": {"image_processor_type": "SiglipImageProcessor", "do_convert_rgb": True, "resample": 3},
    "unknown class": {"image_processor_type": "SomeImageProcessor", "size": {"height": 20, "width": 20}},
}
FILES |= {f"{name}, saved": f"{name}ImageProcessorPil" for name in CLASSES.split()}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A ViT of transformers, and the same model as a folder of hf_vit."""
    root = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    theirs = transformers.ViTForImageClassification(transformers.ViTConfig(**SQUARE))
    theirs.save_pretrained(root / "vit")
    load(root / "vit")[0].save_pretrained(root / "hf_vit")
    return root


def settings_or_error(read):
    try:
        return read().settings()
    except ValueError as error:
        return str(error).split(": ")[-1]


@pytest.mark.parametrize("kind", FILES)
def test_every_door_translates_alike(folders, kind):
    """`load` and `convert` of a transformers folder, `load` of an own folder, with both names of the file, the card."""
    stored = FILES[kind]
    if isinstance(stored, str):
        stored = json.loads(getattr(transformers, stored)().to_json_string())
    texts = {"preprocessor_config.json": json.dumps(stored)}
    nested = {"processor_config.json": json.dumps({"image_processor": stored})}
    found = []
    for files in (texts, nested):
        for folder in (folders / "vit", folders / "hf_vit"):
            for name in ("preprocessor_config.json", "processor_config.json"):
                (folder / name).unlink(missing_ok=True)
            for name, text in files.items():
                (folder / name).write_text(text)
            found.append(settings_or_error(lambda folder=folder: load(folder)[1]))
        found.append(settings_or_error(lambda: convert(folders / "vit")[1]))
    assert all(one == found[0] for one in found)
    if isinstance(found[0], dict):
        Sources({"config.json": (folders / "vit" / "config.json").read_text(), **texts})
    with pytest.raises(ValueError, match=r"hf_vit\.load"):
        HfViTImageProcessor.from_dict(stored)


@pytest.mark.parametrize("name", ["ViT", "Siglip"])
def test_pixel_values_of_transformers(folders, name):
    """transformers' own class computes them, squashed to a size."""
    theirs = getattr(transformers, f"{name}ImageProcessorPil")(size={"height": 20, "width": 20}, image_mean=[0.4] * 3)
    for folder in (folders / "vit", folders / "hf_vit"):
        (folder / "processor_config.json").unlink(missing_ok=True)
        theirs.save_pretrained(folder)
        ours = load(folder)[1](PICTURE, return_tensors="pt").pixel_values
        torch.testing.assert_close(ours, theirs(PICTURE, return_tensors="pt").pixel_values, rtol=0, atol=2e-6)


def test_our_class_refuses_the_file_of_another(tmp_path):
    folder = save_tiny(tmp_path / "model")
    transformers.CLIPImageProcessorPil().save_pretrained(folder)
    with pytest.raises(ValueError, match="CLIPImageProcessor"):
        HfViTImageProcessor.from_pretrained(folder)

    class Own(HfViTImageProcessor):
        pass

    Own(preset="timm").save_pretrained(folder)
    assert Own.from_pretrained(folder).preset == "timm"


@pytest.mark.parametrize("name", ["Bit", "CLIP", "DeiT", "ViT"])
def test_crops_of_any_size_are_transformers(name):
    """The number of removed pixels has all rests of a division by four: half of it is rounded in two ways."""
    settings = {"size": {"shortest_edge": 24}, "crop_size": {"height": 20, "width": 20}, "do_center_crop": True}
    theirs = getattr(transformers, f"{name}ImageProcessorPil")(**settings, resample=3)
    ours = HfViTImageProcessor(**translate_processor(theirs.to_dict()))
    for width in range(20, 32):
        picture = np.random.default_rng(width).integers(0, 255, (24, width, 3), np.uint8)
        for image in (picture, picture.transpose(1, 0, 2).copy()):
            expected = theirs(image, return_tensors="np").pixel_values
            found = ours(image, return_tensors="np").pixel_values
            np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6)


STATED = {  # settings -> whether timm, and transformers, compute the same pixel values of a JPEG
    "timm": ({"preset": "timm"}, True, False),  # the crop's offset
    "timm, no crop": ({"preset": "timm", "crop_pct": None, "do_center_crop": False}, True, True),
    "transformers": ({"preset": "transformers"}, True, True),
    "transformers, crop": ({"preset": "transformers", "do_center_crop": True, "crop_size": 16}, False, True),
    "transformers, TensorFlow's decoder": ({"preset": "transformers", "jpeg_dct": "fast"}, False, False),
    "timm, rounded down": ({"preset": "timm", "resample": "area", "resize_output": "truncated"}, False, False),
    "vit_jax, Pillow's decoder": ({"preset": "vit_jax", "jpeg_dct": "accurate"}, False, False),
    "augreg": ({"preset": "augreg"}, False, False),
}


@pytest.mark.parametrize("case", STATED)
def test_what_a_reader_cannot_compute_is_named_by_an_export(case, tmp_path, caplog):
    settings, in_timm, in_transformers = STATED[case]
    processor = HfViTImageProcessor(size=20, **settings)
    height = output_size(processor)[0]
    model = tiny(image_size=height, patch_size=4)
    export(model, tmp_path / "timm", to="timm", processor=processor)
    assert (not caplog.messages) == in_timm
    caplog.clear()
    export(model, tmp_path / "out", to="transformers", processor=processor)
    assert (not caplog.messages) == in_transformers
