"""Image processors of transformers: every door translates them in the same way."""

import json

import numpy as np
import pytest
import torch
import transformers

from hf_vit import HfViTImageProcessor, load
from hf_vit.conversion import convert, export
from hf_vit.conversion.image_processors import translate_processor
from hf_vit.conversion.tables import IMAGENET
from hf_vit.files.image_sizes import output_size
from hf_vit.hub.cards import Sources

from ..tiny_models import SIZES, save_tiny, tiny

SQUARE = {**SIZES, "image_size": 20, "patch_size": 4, "num_labels": 11}
PICTURES = [np.random.default_rng(0).integers(0, 255, (*size, 3), np.uint8) for size in ((50, 31), (24, 47), (9, 200))]
# All classes of transformers that compute with Pillow, without the ending of their names
CLASSES = sorted(name.removesuffix("ImageProcessorPil") for name in dir(transformers) if "ImageProcessorPil" in name)
# Classes whose files without any field are computed. The others are refused.
COMPUTED = {
    *("Beit", "Bit", "Blip", "CLIP", "ChineseCLIP", "ConvNext", "DPT", "DeiT", "EfficientNet", "Flava", "Levit"),
    *(
        "MobileNetV1",
        "MobileNetV2",
        "MobileViT",
        "OwlViT",
        "PoolFormer",
        "Pvt",
        "Segformer",
        "Siglip",
        "Siglip2",
        "ViT",
    ),
}
HALF = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
CROP = {"do_center_crop": True, "crop_size": {"height": 20, "width": 24}}
WIDE = {"size": {"height": 20, "width": 24}}
SHORT = {"size": {"shortest_edge": 24}}
# (class, fields) of files that are computed
FILES = [
    ("ViT", {**WIDE}),
    ("ViT", {"size": 20, **HALF}),
    ("ViT", {"size": [20, 24], "resample": 3, "image_mean": [0.4, 0.5, 0.6]}),
    ("ViT", {"do_resize": False}),
    ("ViT", {"do_normalize": False}),
    ("ViT", {"do_rescale": False, "do_normalize": False}),
    ("ViT", {"do_rescale": False, **WIDE}),
    ("ViT", {"rescale_factor": 1 / 127.5, **WIDE}),
    ("ViT", {"image_mean": None, "size": None}),
    ("ViT", {"crop_size": 18, "do_center_crop": False, **WIDE}),
    ("ViT", {**WIDE, **CROP, "do_resize": False}),
    ("ViT", {**SHORT, "resample": 1}),
    ("Bit", {**SHORT, **CROP, "resample": 0}),
    ("Bit", {"size": 25, "crop_size": 19}),
    ("CLIP", {"size": 24, "crop_size": 20, "resample": 2, **HALF}),
    ("CLIP", {"use_square_size": True}),
    ("ConvNext", {"size": {"shortest_edge": 20}, "crop_pct": 0.875}),
    ("ConvNext", {"size": 383}),
    ("ConvNext", {"size": 384, "crop_pct": 0.5}),
    ("ConvNext", {"do_resize": False}),
    ("DeiT", {"size": 24, "crop_size": 20}),
    ("DeiT", {"do_center_crop": False, **WIDE}),
    ("DPT", {**WIDE, "ensure_multiple_of": 1, "do_center_crop": True, "crop_size": 9}),
    ("EfficientNet", {**WIDE, **CROP, "include_top": False}),
    ("EfficientNet", {**WIDE, "rescale_offset": True, "rescale_factor": 1 / 127.5}),
    ("EfficientNet", {**WIDE, "rescale_offset": True, "do_normalize": False, "include_top": False}),
    ("EfficientNet", {**WIDE, "rescale_offset": True, "do_rescale": False, "do_normalize": False}),
    ("Flava", {**WIDE, "do_center_crop": False, "codebook_resample": 1}),
    ("ImageGPT", {**WIDE, "do_color_quantize": False}),
    ("Levit", {"size": {"shortest_edge": 20}, "crop_size": 20}),
    ("Levit", {**WIDE, "do_center_crop": False}),
    ("MobileNetV2", {"do_reduce_labels": True}),
    ("MobileViT", {**SHORT, **CROP, "do_flip_channel_order": False}),
    ("MobileViT", {**SHORT, "crop_size": 37, "do_normalize": True, **HALF}),
    ("OwlViT", {**WIDE, "rescale": False}),
    ("PoolFormer", {"crop_pct": 0.95, "size": 24, "crop_size": 20}),
    ("PoolFormer", {"crop_pct": 0.9, "size": {"height": 24, "width": 24}, "crop_size": 20}),
    ("PoolFormer", {"crop_pct": 0.9, "size": {"height": 24, "width": 30}, "crop_size": 20}),
    ("Segformer", {**WIDE, **CROP}),
    ("Siglip2", {"patch_size": 4, "max_num_patches": 30}),
]
# (class, fields) of files that are refused, and the field that the message names
REFUSED = [
    ("ViT", {"do_pad": True, **WIDE}, "do_pad"),
    ("CLIP", {"size": {"shortest_edge": 24, "longest_edge": 40}}, "longest_edge"),
    ("Bit", {"size": {"max_height": 24, "max_width": 40}}, "max_height"),
    ("DeiT", {"size": "large"}, "large"),
    ("DPT", {"keep_aspect_ratio": True}, "keep_aspect_ratio"),
    ("DPT", {"ensure_multiple_of": 32}, "ensure_multiple_of"),
    ("ImageGPT", {"clusters": [[0, 0, 0]]}, "do_color_quantize"),
    ("Donut", {}, "do_thumbnail"),
    ("GLPN", {}, "size_divisor"),
    ("Vilt", {}, "size_divisor"),
    ("SomethingNew", {}, "SomethingNewImageProcessor"),
]


def read_file(kind, fields, ending="ImageProcessor"):
    return HfViTImageProcessor(**translate_processor({"image_processor_type": f"{kind}{ending}", **fields}))


def assert_equal(ours, theirs):
    """Pixel values are equal to float rounding: 1e-4 of a level."""
    for picture in PICTURES:
        expected = theirs(picture, return_tensors="np").pixel_values
        found = ours(picture, return_tensors="np").pixel_values
        assert found.shape == expected.shape
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", CLASSES)
def test_every_class_is_computed_or_refused(kind):
    """With the values of fields that it has without a file, which transformers also writes into one."""
    theirs = getattr(transformers, f"{kind}ImageProcessorPil")
    if kind in COMPUTED:
        assert_equal(read_file(kind, {}), theirs())
        assert_equal(read_file(kind, theirs().to_dict(), "ImageProcessorFast"), theirs())
        return
    with pytest.raises(ValueError, match=f"{kind}FeatureExtractor"):
        read_file(kind, {}, "FeatureExtractor")


@pytest.mark.parametrize(("kind", "fields"), FILES)
def test_a_file_has_the_pixel_values_of_its_class(kind, fields):
    stated = {name: value for name, value in fields.items() if value is not None}
    theirs = getattr(transformers, f"{kind}ImageProcessorPil").from_dict(stated)
    assert_equal(read_file(kind, fields, "FeatureExtractor"), theirs)


@pytest.mark.parametrize(("kind", "fields", "field"), REFUSED)
def test_a_value_that_is_not_computed_is_refused(kind, fields, field):
    with pytest.raises(ValueError, match=field) as refusal:
        read_file(kind, fields)
    assert f"{kind}ImageProcessor" in str(refusal.value)


def test_classes_that_transformers_no_longer_has():
    """As of transformers 4.57: both have the steps of the base class."""
    clip = transformers.BitImageProcessorPil()
    assert_equal(read_file("ViTHybrid", {}), clip)
    squashed = {
        "size": {"height": 224, "width": 224},
        "image_mean": [0.485, 0.456, 0.406],
        "image_std": [0.229, 0.224, 0.225],
    }
    assert_equal(read_file("EfficientFormer", {}), transformers.DeiTImageProcessorPil(**squashed))


def test_levels_that_are_rescaled_before_the_resize_are_not_rounded():
    """DINOv3, which transformers computes with torchvision; its resize of floats is torch's."""
    processor = read_file("DINOv3ViT", WIDE)
    for picture in PICTURES:
        levels = torch.from_numpy(picture).permute(2, 0, 1)[None] / 255
        resized = torch.nn.functional.interpolate(levels, (20, 24), mode="bilinear", antialias=True)
        mean, std = (torch.tensor(values)[:, None, None] for values in (IMAGENET["image_mean"], IMAGENET["image_std"]))
        found = processor(picture, return_tensors="pt").pixel_values
        torch.testing.assert_close(found, (resized - mean) / std, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "fields", "named"),
    [
        ("CLIP", {"crop_pct": 0.9}, "crop_pct"),
        ("MobileViT", {"do_normalize": True, **HALF}, "do_normalize"),
        ("ViT", {}, None),
    ],
)
def test_fields_without_effect_are_named(kind, fields, named, caplog):
    read_file(kind, {**getattr(transformers, f"{kind}ImageProcessorPil")().to_dict(), **fields})
    assert ("without effect" in caplog.text) == (named is not None)
    assert named is None or named in caplog.text


DOORS = {f"{kind}, {number}": (kind, fields) for number, (kind, fields) in enumerate(FILES)}
DOORS |= {f"{kind}, refused": (kind, fields) for kind, fields, _ in REFUSED}
DOORS |= {f"{kind}, nothing": (kind, {}) for kind in ("ViT", "ViTHybrid", "CLIP", "LayoutLMv2")}


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


@pytest.mark.parametrize("case", DOORS)
def test_every_door_translates_alike(folders, case):
    """`load` and `convert` of a transformers folder, `load` of an own folder, with both names of the file, the card."""
    kind, fields = DOORS[case]
    stored = {"image_processor_type": f"{kind}ImageProcessor", **fields}
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
    for other in found[1:]:
        assert other == found[0]
    if isinstance(found[0], dict):
        Sources({"config.json": (folders / "vit" / "config.json").read_text(), **texts})
    with pytest.raises(ValueError, match=r"hf_vit\.load"):
        HfViTImageProcessor.from_dict(stored)


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
