import pytest
import torch
from transformers import AutoConfig

import hf_vit
from hf_vit.models.configuration_hf_vit import VARIANTS, HfViTConfig, HfViTHybridConfig

from ..published import VIT_PARAMETERS


def test_every_variant_is_counted():
    assert set(VARIANTS) == set(VIT_PARAMETERS)


@pytest.mark.parametrize(("name", "parameters"), VIT_PARAMETERS.items())
def test_parameter_counts(name, parameters):
    config = HfViTConfig.from_variant(name, num_labels=1000)
    hybrid = isinstance(config, HfViTHybridConfig)
    model_class = hf_vit.HfViTHybridForImageClassification if hybrid else hf_vit.HfViTForImageClassification
    with torch.device("meta"):
        assert model_class(config).num_parameters() == parameters


def test_from_variant_overrides_and_refuses():
    config = HfViTConfig.from_variant("B/16", image_size=384)
    assert config.grid_size == (24, 24)
    with pytest.raises(ValueError, match=r"unknown variant 'B/17'; known: Ti/16"):
        HfViTConfig.from_variant("B/17")


def test_defaults_are_the_originals():
    config = HfViTConfig()
    assert (config.hidden_act, config.layer_norm_eps) == ("gelu_pytorch_tanh", 1e-6)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_sizes": 3}, "does not know hidden_sizes"),
        ({"image_size": 225}, "image height 225 is not a multiple of 16.*nearest sizes are 224 and 240"),
        ({"image_size": (224, 100)}, "image width 100 is not a multiple of 16.*nearest sizes are 96 and 112"),
        ({"image_size": 7}, "image height 7 is not a multiple of 16.*nearest sizes are 16$"),
        ({"num_attention_heads": 7}, r"hidden_size \(768\) is not a multiple of num_attention_heads \(7\)"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0; it must be at least 1"),
        ({"patch_size": 0}, "patch_size is 0"),
        ({"hidden_dropout_prob": 1.0}, "hidden_dropout_prob is 1.0; it must be at least 0 and less than 1"),
        ({"pooling": "avg"}, "expected one of"),
        ({"hidden_size": 6, "num_attention_heads": 2, "position_embedding_type": "sincos2d"}, "not a multiple of 4"),
        ({"hidden_size": 7, "num_attention_heads": 1, "position_embedding_type": "learned2d"}, r"\(7\) is odd"),
        (
            {"position_embedding_type": "relative", "position_embedding_placement": "every_layer"},
            "every_layer is for learned and learned2d, not relative",
        ),
        ({"attention_axes": "axial"}, "no place for a class token: set use_cls_token=False, pooling='mean'"),
        ({"attention_axes": "axial", "pooling": "mean", "num_hidden_layers": 5}, "num_hidden_layers is 5; .* pairs"),
        ({"attention_axes": "axial", "pooling": "mean", "position_embedding_type": "relative"}, "needs another"),
    ],
)
def test_impossible_architectures_are_refused(fields, message):
    with pytest.raises(Exception, match=f"(?s){message}"):
        HfViTConfig(**fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"stem_width": 48}, "48.*not a multiple of 32"), ({"stem_depths": [3, 0]}, "at least 1 unit")],
)
def test_impossible_stems_are_refused(fields, message):
    with pytest.raises(Exception, match=message):
        HfViTHybridConfig(**fields)


@pytest.mark.parametrize("name", ["S/32-gap-norep", "R26+S/32"])
def test_saved_and_loaded_through_auto_config(name, tmp_path):
    config = HfViTConfig.from_variant(name, image_size=(256, 320), num_labels=11, drop_path_rate=0.1)
    config.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert type(loaded) is type(config)
    assert loaded.to_json_string() == config.to_json_string()
    assert loaded.num_labels == 11
