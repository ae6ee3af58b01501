"""Agreement of a model and its image processor on the image size; a difference gives one warning.

Compared with what `transformers.pipeline` passes to the model, and with the numbers of the published processors.
"""

import logging

import pytest
import torch
import transformers
from PIL import Image
from transformers import AutoImageProcessor, pipeline

import hf_vit
from hf_vit.files.image_sizes import output_size, set_processor_size
from hf_vit.loading import save_folder
from hf_vit.models.sizes import as_pair

from ..tiny_models import SIZES, tiny, tiny_bit

ASKED = (40, 64)
PICTURE = Image.effect_noise((77, 50), 80).convert("RGB")
UPSTREAM = {**SIZES, "image_size": 24, "patch_size": 8, "num_labels": 11}
UPSTREAM_BIT = {"embedding_size": 32, "depths": [1, 1], "hidden_sizes": [128, 256], "num_labels": 11}
IMAGENET = ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
HALVES = ([0.5] * 3, [0.5] * 3)


@pytest.fixture(autouse=True)
def _no_earlier_warnings():
    type(logging.getLogger("hf_vit")).warning_once.cache_clear()


@pytest.fixture
def warned(caplog):
    """Return a function that returns the warnings of the test so far."""
    return lambda: [record.getMessage() for record in caplog.records if record.name.startswith("hf_vit")]


BUILD = {  # models of 24 x 24 pixels, or 24 x 48
    "vit": lambda: tiny(image_size=24, patch_size=8),
    "hybrid": lambda: tiny(hybrid=True, image_size=(24, 48)),
    "bit": lambda: tiny_bit(image_size=24),
    "transformers vit": lambda: transformers.ViTForImageClassification(transformers.ViTConfig(**UPSTREAM)),
    "transformers bit": lambda: transformers.BitForImageClassification(transformers.BitConfig(**UPSTREAM_BIT)),
    "vit_mae": lambda: transformers.ViTMAEForPreTraining(transformers.ViTMAEConfig(**UPSTREAM, mask_ratio=0.0)),
}
UPSTREAM_PROCESSORS = {
    "transformers vit": transformers.ViTImageProcessorPil(size={"height": 24, "width": 24}),
    "transformers bit": transformers.BitImageProcessorPil(
        size={"shortest_edge": 30}, crop_size={"height": 24, "width": 24}
    ),
}


def processor_for(model, **settings) -> hf_vit.HfViTImageProcessor:
    return hf_vit.HfViTImageProcessor(size=list(as_pair(model.config.image_size)), **settings)


@pytest.fixture(params=[*BUILD][:5])
def pair(request, tmp_path):
    """A folder with a model and an image processor of its size."""
    model = BUILD[request.param]()
    model.save_pretrained(tmp_path)
    (UPSTREAM_PROCESSORS.get(request.param) or processor_for(model)).save_pretrained(tmp_path)
    return tmp_path


def size_in_pipeline(*args, **kwargs) -> tuple[int, ...]:
    """Return the size of the images that a pipeline gives to the model."""
    classify = pipeline("image-classification", *args, **kwargs)
    assert len(classify(PICTURE)) == 5
    return tuple(classify.preprocess(PICTURE)["pixel_values"].shape[2:])


@pytest.mark.parametrize("preset", [None, "timm"])
def test_load_with_another_image_size_sets_model_and_processor(pair, preset, tmp_path, warned):
    model, processor = hf_vit.load(pair, image_size=ASKED, preset=preset)
    assert tuple(model.config.image_size) == ASKED
    assert size_in_pipeline(model=model, image_processor=processor) == ASKED
    save_folder(tmp_path / "saved", model, processor)
    assert size_in_pipeline(str(tmp_path / "saved")) == ASKED
    assert not warned()


def test_a_preset_keeps_the_stored_mean_and_deviation(tmp_path):
    BUILD["transformers vit"]().save_pretrained(tmp_path)
    theirs = transformers.ViTImageProcessorPil(size={"height": 24, "width": 24}, image_mean=[0.1, 0.2, 0.3])
    theirs.save_pretrained(tmp_path)
    processor = hf_vit.load(tmp_path, image_size=40, preset="big_vision")[1]
    assert (processor.preset, [*processor.image_mean]) == ("big_vision", [0.1, 0.2, 0.3])
    assert processor.size == {"shortest_edge": 45}  # int(40 / (7 / 8))
    native = hf_vit.load(tmp_path, preset="native")[1](PICTURE, return_tensors="pt")
    assert native.pixel_values.shape[1:] == (9, 8 * 8 * 3)  # as many patches as the model has
    with pytest.raises(ValueError, match="'jax'"):
        hf_vit.load(tmp_path, preset="jax")


Processor = hf_vit.HfViTImageProcessor
RESIZES = [  # processors for 224 pixels, and the size before the crop that they have for 384
    (Processor("augreg", size=224), {"shortest_edge": 448}),  # its own two ratios, 8/7 and 7/6
    (Processor("timm", size=224), {"shortest_edge": 384}),
    (Processor("timm", size=224, crop_pct=0.5), {"shortest_edge": 768}),
    (Processor("vit_jax", size=448, crop_size=224, do_center_crop=True), {"height": 768, "width": 768}),
    (Processor("augreg", size=224, do_center_crop=False), {"height": 384, "width": 384}),
    (Processor("bit", size={"shortest_edge": 448}, crop_size=224, do_center_crop=True), {"shortest_edge": 768}),
    (Processor("transformers", size=224), {"height": 384, "width": 384}),
]


@pytest.mark.parametrize(("processor", "resized"), RESIZES)
def test_a_new_size_keeps_the_ratio_of_crop_and_resize(processor, resized):
    set_processor_size(processor, 384)
    assert dict(processor.size) == resized
    assert processor(PICTURE, return_tensors="pt").pixel_values.shape[2:] == (384, 384)


@pytest.mark.parametrize(
    ("kind", "preset", "normalization"),
    [
        ("vit", "augreg", HALVES),  # that of its record
        ("vit", "vit_jax", HALVES),
        ("bit", "bit", HALVES),
        # preprocessor_config.json of google/vit-base-patch16-224 and facebook/vit-mae-base; timm's settings of its BiT
        ("transformers vit", "transformers", HALVES),
        ("vit_mae", "transformers", IMAGENET),
        ("transformers bit", "timm", HALVES),
    ],
)
def test_a_folder_without_an_image_processor(kind, preset, normalization, tmp_path, warned):
    model = BUILD[kind]()
    if preset == "augreg":
        model.conversion_record = {"preset": preset}
    model.save_pretrained(tmp_path)
    model, processor = hf_vit.load(tmp_path)
    assert (processor.preset, (processor.image_mean, processor.image_std)) == (preset, normalization)
    assert output_size(processor) == ((224, 224) if kind == "transformers bit" else (24, 24))
    (message,) = warned()
    assert preset in message


def test_different_sizes_of_model_and_processor_give_one_warning(tmp_path, warned):
    tiny(image_size=(40, 56), patch_size=8).save_pretrained(tmp_path)
    hf_vit.HfViTImageProcessor("timm", size=24).save_pretrained(tmp_path)
    model, processor = hf_vit.load(tmp_path)
    assert output_size(processor) == tuple(model.config.image_size) == (40, 56)
    classify = pipeline("image-classification", str(tmp_path))
    assert len(classify([PICTURE] * 3)) == 3
    of_load, of_pipeline = warned()
    assert "40 x 56" in of_load
    assert "24 x 24" in of_pipeline


@pytest.mark.parametrize("kind", ["vit", "hybrid", "bit"])
def test_images_of_another_size_give_one_warning_unless_requested(kind, warned):
    images = torch.zeros(1, 3, *ASKED)
    meant, model = BUILD[kind](), BUILD[kind]()
    expected = meant(images, interpolate_pos_encoding=True).logits
    assert not warned()
    assert torch.equal(model(images).logits, expected)
    model(images), model(torch.zeros(1, 3, 56, 80))
    (message,) = warned()
    assert "40 x 64" in message


def test_native_resolution_and_analysis_give_no_warning(warned):
    model = BUILD["vit"]()
    native = processor_for(model, preset="native", patch_size=8, max_num_patches=20)(PICTURE, return_tensors="pt")
    model(**native)
    hf_vit.analysis.attention_rollout(model, native)
    hf_vit.analysis.attention_rollout(model, torch.zeros(1, 3, *ASKED))
    assert not warned()


def test_saved_model_and_processor_have_the_same_size(tmp_path, warned):
    model = BUILD["vit"]()
    processor = processor_for(model)
    model.set_image_size((40, 56))
    save_folder(tmp_path / "out", model, processor)
    assert output_size(processor) == (24, 24)
    assert output_size(AutoImageProcessor.from_pretrained(tmp_path / "out")) == (40, 56)
    assert size_in_pipeline(str(tmp_path / "out")) == (40, 56)
    assert len(warned()) == 1


def test_arguments_of_load_reach_model_and_processor(tmp_path):
    save_folder(tmp_path / "outer" / "inner", model := BUILD["vit"](), processor_for(model, preset="augreg"))
    model, processor = hf_vit.load(tmp_path / "outer", image_size=40, subfolder="inner", dtype=torch.float64)
    assert (model.config.image_size, output_size(processor), processor.preset) == (40, (40, 40), "augreg")
    assert model.dtype == torch.float64


def test_model_and_processor_on_the_hub_have_the_same_size(hub, client, tmp_path):
    """Load from a branch, with a token, into a cache; model and processor are pushed in any order."""
    BUILD["vit"]().save_pretrained(tmp_path / "tiny")
    client(f"""
        import hf_vit
        from hf_vit import HfViTForImageClassification, HfViTImageProcessor, load
        from hf_vit.files.image_sizes import output_size
        model = HfViTForImageClassification.from_pretrained({str(tmp_path / "tiny")!r})
        hf_vit.push_saved(model, "alice/vit", private=True)
        hf_vit.push_saved(HfViTImageProcessor(size=24), "alice/vit")
        model.set_image_size((40, 56))
        hf_vit.push_saved(model, "alice/vit", revision="wide")
        assert output_size(load("alice/vit")[1]) == (24, 24)
        model, processor = load("alice/vit", revision="wide", cache_dir={str(tmp_path)!r})
        assert tuple(model.config.image_size) == output_size(processor) == (40, 56), processor
        hf_vit.push_saved(HfViTImageProcessor(size=24), "alice/vit", revision="wide")
        assert output_size(load("alice/vit", revision="wide", token="hf_alice", force_download=True)[1]) == (40, 56)
    """)
