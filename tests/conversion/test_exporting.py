"""Ways back: each structure is written in each format and read again, by hf_vit and by the format's own library.

Logits are equal, or the structure is refused with the name of the setting. The readers of .npz are the originals, whose
outputs are goldens (test_way_back.py); timm's are in test_timm.py.
"""

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoModelForImageClassification

from hf_vit import HfViTImageProcessor
from hf_vit.conversion import ConversionError, convert, export

from ..comparing import logits
from ..tiny_models import images, tiny, tiny_bit

EVERYWHERE = {"jax": "", "transformers": "", "timm": ""}
VARIANCE = {"weight_standardization_form": "variance", "weight_standardization_eps": 1e-8, "group_norm_eps": 1e-5}
EXACT = {"hidden_act": "gelu", "layer_norm_eps": 1e-12}  # as in transformers and in timm
# structure: fields of `tiny`; and for each format the word of a refusal, or "" where logits are equal. "encoder" in the
# name of a structure: without the head.
STRUCTURES = {
    "cls": ({}, EVERYWHERE),
    "encoder": ({}, EVERYWHERE),
    "encoder, pre-logits": ({"representation_size": 9}, {"jax": "", "transformers": "", "timm": "representation_size"}),
    "encoder, map": ({"pooling": "map", "patch_size": 4, "image_size": (20, 20)}, EVERYWHERE),
    "one head": ({"num_attention_heads": 1}, EVERYWHERE),
    "no position of the class token": ({"no_embed_class": True}, EVERYWHERE),
    "encoder, no position of the class token": ({"no_embed_class": True}, EVERYWHERE),
    "mean, class token without a position": (
        {"pooling": "mean", "use_cls_token": True, "no_embed_class": True},
        {"jax": "use_cls_token", "transformers": "pooling", "timm": ""},
    ),
    "no pooling": ({"pooling": "none"}, {"jax": "", "transformers": "pooling", "timm": ""}),
    "no pooling, class token": (
        {"pooling": "none", "use_cls_token": True},
        {"jax": "", "transformers": "pooling", "timm": ""},
    ),
    "pre-logits after the mean": (
        {"pooling": "mean", "representation_size": 9},
        {"jax": "", "transformers": "pooling", "timm": "representation_size"},
    ),
    "pre-logits after a map": (
        {"pooling": "map", "representation_size": 9},
        {"jax": "", "transformers": "pooling", "timm": "representation_size"},
    ),
    "map of the patches": (
        {"pooling": "map", "use_cls_token": True, "pool_patches_only": True},
        {"jax": "use_cls_token", "transformers": "pooling", "timm": ""},
    ),
    "norm after a map": (
        {"pooling": "map", "norm_after_pooling": True},
        {"jax": "norm_after_pooling", "transformers": "norm_after_pooling", "timm": ""},
    ),
    "sine and cosine, class token": (
        {"position_embedding_type": "sincos2d", "hidden_size": 16},
        {"jax": "", "transformers": "position_embedding_type", "timm": "position_embedding_type"},
    ),
    "positions of rows and columns": (
        {"position_embedding_type": "learned2d"},
        dict.fromkeys(("jax", "transformers", "timm"), "position_embedding_type"),
    ),
    "positions shared by layers": (
        {"position_embedding_placement": "every_layer_shared"},
        dict.fromkeys(("jax", "transformers", "timm"), "position_embedding_placement"),
    ),
    "quick GELU": ({"hidden_act": "quick_gelu"}, {"jax": "hidden_act", "transformers": "", "timm": ""}),
    "another activation": ({"hidden_act": "silu"}, {"jax": "hidden_act", "transformers": "", "timm": "hidden_act"}),
    "1 channel": ({"num_channels": 1}, EVERYWHERE),
    "hybrid of 4 stages": (
        {"hybrid": True, "stem_depths": [1, 1, 1, 1], "patch_size": 1, "image_size": (64, 96)},
        {"jax": "", "transformers": "model_type", "timm": "stem_depths"},
    ),
    "hybrid, mean": (
        {"hybrid": True, "pooling": "mean"},
        {"jax": "", "transformers": "pooling", "timm": "stem_depths"},
    ),
    "hybrid, no position of the class token": (
        {"hybrid": True, "no_embed_class": True},
        {"jax": "no_embed_class", "transformers": "model_type", "timm": "stem_depths"},
    ),
    "hybrid with timm's numbers": (
        {"hybrid": True, "stem_depths": [], "stem_width": 64, **VARIANCE},
        {"jax": "weight_standardization", "transformers": "model_type", "timm": ""},
    ),
    "numbers of transformers": (EXACT, {"jax": "hidden_act", "transformers": "", "timm": ""}),
    "mean": ({"pooling": "mean"}, {"jax": "", "transformers": "pooling", "timm": ""}),
    "mean, class token": (
        {"pooling": "mean", "use_cls_token": True},
        {"jax": "use_cls_token", "transformers": "pooling", "timm": ""},
    ),
    "mean of the patches": (
        {"pooling": "mean", "use_cls_token": True, "pool_patches_only": True},
        {"jax": "use_cls_token", "transformers": "pooling", "timm": ""},
    ),
    "map": ({"pooling": "map"}, {"jax": "", "transformers": "pooling", "timm": ""}),
    "map, class token": (
        {"pooling": "map", "use_cls_token": True},
        {"jax": "use_cls_token", "transformers": "pooling", "timm": ""},
    ),
    "pre-logits": (
        {"representation_size": 9},
        {"jax": "", "transformers": "representation_size", "timm": "representation_size"},
    ),
    "norm after the mean": (
        {"pooling": "mean", "norm_after_pooling": True},
        {"jax": "norm_after_pooling", "transformers": "norm_after_pooling", "timm": ""},
    ),
    "sine and cosine": (
        {"pooling": "mean", "position_embedding_type": "sincos2d", "hidden_size": 16},
        {"jax": "", "transformers": "position_embedding_type", "timm": "position_embedding_type"},
    ),
    "no positions": (
        {"position_embedding_type": "none"},
        {"jax": "", "transformers": "position_embedding_type", "timm": ""},
    ),
    "relative positions": (
        {"position_embedding_type": "relative"},
        dict.fromkeys(("jax", "transformers", "timm"), "position_embedding_type"),
    ),
    "positions in every layer": (
        {"position_embedding_placement": "every_layer"},
        dict.fromkeys(("jax", "transformers", "timm"), "position_embedding_placement"),
    ),
    "axial attention": (
        {"attention_axes": "axial", "pooling": "mean", "num_hidden_layers": 4},
        dict.fromkeys(("jax", "transformers", "timm"), "attention_axes"),
    ),
    "no bias": ({"qkv_bias": False}, {"jax": "qkv_bias", "transformers": "", "timm": ""}),
    "relu": ({"hidden_act": "relu"}, {"jax": "hidden_act", "transformers": "", "timm": ""}),
    "5 channels": ({"num_channels": 5}, EVERYWHERE),
    "square patches": ({"patch_size": 4, "image_size": (20, 36)}, EVERYWHERE),
    "hybrid": ({"hybrid": True}, {"jax": "", "transformers": "model_type", "timm": "stem_depths"}),
    "bare stem": (
        {"hybrid": True, "stem_depths": []},
        {"jax": "", "transformers": "model_type", "timm": "stem_width"},
    ),
    "bare stem of 64 channels": (
        {"hybrid": True, "stem_depths": [], "stem_width": 64},
        {"jax": "", "transformers": "model_type", "timm": ""},
    ),
}
CASES = [(name, to) for name, (_, formats) in STRUCTURES.items() for to in formats]
# timm has one value for these numbers; the largest relative difference
TOLERANCES = {("numbers of transformers", "timm"): 1e-4, ("bare stem of 64 channels", "timm"): 1e-4}


def pixels_for(model):
    torch.manual_seed(5)
    return torch.randn(2, model.config.num_channels, *model.config.image_size)


def assert_equal(ours, theirs, tolerance):
    torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance * float(theirs.abs().max()))


@pytest.mark.parametrize(("structure", "to"), CASES)
def test_a_structure_comes_back_or_is_refused(tmp_path, structure, to):
    fields, refusals = STRUCTURES[structure]
    is_encoder = "encoder" in structure
    model = tiny(**fields)
    if is_encoder:
        model = model.base_model
    height, width = model.config.image_size
    path = tmp_path / ("model.npz" if to == "jax" else "folder")
    processor = HfViTImageProcessor.for_model(model.config, preset="transformers")
    if refusals[to]:
        with pytest.raises(ConversionError, match=refusals[to]):
            export(model, path, to, processor=processor)
        assert not path.exists()
        return
    export(model, path, to, processor=processor)
    unstated = {}
    if to == "jax":
        unstated = {"position_grid": model.config.grid_size}
        not_in_the_file = ("position_embedding_type", "pooling")
        unstated |= {name: fields[name] for name in not_in_the_file if fields.get(name) == "none"}
    again, processor_again = convert(path, **unstated)
    tolerance = TOLERANCES.get((structure, to), 1e-6)
    pixel_values = pixels_for(model)
    assert_equal(logits(again, pixel_values), logits(model, pixel_values), tolerance)
    if to != "jax" and model.config.num_channels == 3:
        image = np.random.default_rng(0).integers(0, 256, (height + 9, width + 20, 3), np.uint8)
        ours, theirs = (each(image, return_tensors="np").pixel_values for each in (processor_again, processor))
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)
    if to == "transformers":
        auto_class = AutoModel if is_encoder else AutoModelForImageClassification
        theirs = auto_class.from_pretrained(path)
        assert type(theirs).__module__.startswith("transformers.")
        assert_equal(logits(theirs, pixel_values), logits(model, pixel_values), tolerance)


@pytest.mark.parametrize("to", ["jax", "transformers"])
def test_a_resnet_comes_back(tmp_path, to):
    model = tiny_bit(padding="same", weight_standardization_eps=1e-8, group_norm_eps=1e-5)
    if to == "jax":
        model = tiny_bit()
    path = tmp_path / ("model.npz" if to == "jax" else "folder")
    export(model, path, to)
    again, _ = convert(path)
    pixel_values = images(model)
    assert_equal(logits(again, pixel_values), logits(model, pixel_values), 1e-6)


@pytest.mark.parametrize(
    ("fields", "settings", "to", "named"),
    [
        ({"pooling": "none"}, {"preset": "timm"}, "jax", "pooling"),
        ({"position_embedding_type": "none"}, {"preset": "timm"}, "jax", "position_embedding_type"),
        ({}, {"preset": "timm", "image_mean": [0.485, 0.456, 0.406]}, "jax", "0.485"),
        ({}, {"preset": "timm", "do_normalize": False}, "jax", "[-1, 1]"),
        ({}, {"preset": "augreg"}, "transformers", "area"),
        ({}, {"preset": "vit_jax"}, "transformers", "antialias"),
        ({}, {"preset": "vit_jax"}, "timm", "antialias"),
        ({"layer_norm_eps": 1e-12}, {"preset": "transformers"}, "timm", "layer_norm_eps"),
    ],
)
def test_what_a_format_does_not_state_is_named(tmp_path, caplog, fields, settings, to, named):
    model = tiny(**fields)
    export(model, tmp_path / "file.npz", to, processor=HfViTImageProcessor.for_model(model.config, **settings))
    assert named in caplog.text


@pytest.mark.parametrize(("to", "preset"), [("jax", "timm"), ("transformers", "transformers"), ("timm", "timm")])
def test_nothing_is_named_without_a_difference(tmp_path, caplog, to, preset):
    model = tiny(image_size=(24, 24), hidden_act="gelu_pytorch_tanh", layer_norm_eps=1e-6)
    export(model, tmp_path / "file.npz", to, processor=HfViTImageProcessor.for_model(model.config, preset=preset))
    assert caplog.text == ""
