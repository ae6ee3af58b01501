import json

import pytest
import torch
from transformers import AutoConfig, AutoImageProcessor, AutoModel, AutoModelForImageClassification, pipeline
from transformers.utils import logging

import hf_vit
from hf_vit.loading import load, save_folder
from hf_vit.models.configuration_hf_vit import VARIANTS, HfViTConfig, HfViTHybridConfig
from hf_vit.models.registry import config_of_variant

from ..comparing import change_json
from ..references import VIT_PARAMETERS
from ..tiny_models import UNKNOWN_FIELDS


@pytest.mark.parametrize("name", VARIANTS)
def test_parameter_counts(name):
    config = HfViTConfig.from_variant(name, num_labels=1000)
    hybrid = isinstance(config, HfViTHybridConfig)
    model_class = hf_vit.HfViTHybridForImageClassification if hybrid else hf_vit.HfViTForImageClassification
    with torch.device("meta"):
        assert model_class(config).num_parameters() == VIT_PARAMETERS[name]


def test_from_variant_takes_overrides_and_refuses_unknown_names():
    config = HfViTConfig.from_variant("B/16", image_size=384)
    assert config.grid_size == (24, 24)
    with pytest.raises(ValueError, match="'B/17'"):
        HfViTConfig.from_variant("B/17")
    for variant in ("B/16", "R50x1"):
        with pytest.raises(ValueError, match="name"):
            config_of_variant(variant, name="x")  # `config: {name: x}` of a recipe is a field


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_sizes": 3}, "hidden_sizes"),
        ({"image_size": 225}, "225"),
        ({"image_size": 7}, "16"),
        ({"num_attention_heads": 7}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"patch_size": 0}, "patch_size"),
        ({"hidden_dropout_prob": 1.0}, "hidden_dropout_prob"),
        ({"pooling": "avg"}, "avg"),
        ({"hidden_size": 6, "num_attention_heads": 2, "position_embedding_type": "sincos2d"}, "6"),
        ({"hidden_size": 7, "num_attention_heads": 1, "position_embedding_type": "learned2d"}, "7"),
        ({"position_embedding_type": "relative", "position_embedding_placement": "every_layer"}, "every_layer"),
        ({"no_embed_class": True, "position_embedding_type": "relative"}, "relative"),
        ({"no_embed_class": True, "position_embedding_placement": "every_layer"}, "every_layer"),
        ({"label2id": {"cat": 0, "dtype": []}}, "label2id"),
        ({"attention_axes": "axial"}, "use_cls_token"),
        ({"attention_axes": "axial", "pooling": "mean", "num_hidden_layers": 5}, "num_hidden_layers"),
        ({"attention_axes": "axial", "pooling": "mean", "position_embedding_type": "relative"}, "relative"),
        ({"stem_width": 48}, "48"),
        ({"stem_depths": [3, 0]}, "stem_depths"),
    ],
)
def test_impossible_architectures_are_refused(fields, message):
    config_class = HfViTHybridConfig if any(name.startswith("stem") for name in fields) else HfViTConfig
    with pytest.raises(ValueError, match=message):
        config_class(**fields)


@pytest.mark.parametrize("name", ["S/32-gap-norep", "R26+S/32"])
def test_auto_config_loads_a_saved_configuration(name, tmp_path):
    config = HfViTConfig.from_variant(name, image_size=(256, 320), num_labels=11, drop_path_rate=0.1)
    config.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert type(loaded) is type(config)
    assert loaded.to_json_string() == config.to_json_string()
    assert loaded.num_labels == 11


FILES = ("config.json", "preprocessor_config.json")


LOADERS = {
    "load": load,
    "auto classes": lambda folder: (
        AutoModelForImageClassification.from_pretrained(folder),
        AutoImageProcessor.from_pretrained(folder),
    ),
    "their own classes": lambda folder: (
        hf_vit.HfViTForImageClassification.from_pretrained(folder),
        hf_vit.HfViTImageProcessor.from_pretrained(folder),
    ),
    "pipeline": lambda folder: (
        (made := pipeline("image-classification", model=str(folder))).model,
        made.image_processor,
    ),
}


@pytest.mark.parametrize("loader", LOADERS.values(), ids=LOADERS)
def test_unknown_fields_of_a_folder_are_kept_with_one_warning(loader, folder, tmp_path, caplog):
    """Of a newer version, or of another tool."""
    logging.warning_once.cache_clear()
    for file in FILES:
        change_json(folder / file, **UNKNOWN_FIELDS)
    model, processor = loader(folder)
    for file in FILES:
        (warning,) = (text for text in caplog.messages if text.startswith(file))
        assert all(name in warning for name in UNKNOWN_FIELDS)
    assert model.config.added_by_a_tool == processor.added_by_a_tool == UNKNOWN_FIELDS["added_by_a_tool"]
    save_folder(tmp_path / "again", model, processor)
    for file in FILES:
        assert json.loads((tmp_path / "again" / file).read_text()).items() >= UNKNOWN_FIELDS.items()


@pytest.mark.parametrize(
    "call",
    [
        lambda folder, **wrong: HfViTConfig(**wrong),
        lambda folder, **wrong: HfViTConfig.from_variant("B/16", **wrong),
        hf_vit.HfViTModel.from_pretrained,
        AutoModel.from_pretrained,
        load,
    ],
    ids=["configuration", "variant", "HfViTModel", "AutoModel", "load"],
)
def test_unknown_arguments_are_refused(call, folder):
    with pytest.raises((ValueError, TypeError), match="hiden_size"):  # transformers raises TypeError
        call(folder, hiden_size=3)
