"""Every recipe that cites an original configuration is compared with it, field by field.

The originals judge: goldens/training/recipes.json is what their configuration files resolve to when they are run. A
recipe's `cites` maps names of these, {group} standing for a level of its options, to the levels they are compared at.
Where fields differ, its `differs` gives the reason. A difference that is not stated fails, as does a stated one that is
none.
"""

import dataclasses
import fnmatch
import itertools
import json
import re
import string
from typing import Any

import pytest
import torch

from hf_vit import HfViTConfig, HfViTForImageClassification
from hf_vit.conversion.jax.tables import vit_table
from hf_vit.conversion.tables import expand
from hf_vit.data.splits import Split
from hf_vit.settings.fields import FinetuneSettings, PretrainSettings
from hf_vit.training.build import build_config, build_for_pretraining, count_steps, load_for_finetuning, set_head_bias
from hf_vit.training.optimization import build_schedule, kernel_names

from ..paths import GOLDENS
from ..tiny_models import SIZES, save_tiny, tiny
from .test_shipped_files import NAMES, read, resolve

ORIGINALS: dict[str, dict[str, Any]] = json.loads((GOLDENS / "training" / "recipes.json").read_text())["recipes"]
TABLES = {  # of the originals: not configurations, but what these are made of; each has a test below
    "big_vision/transfer_best",
    "big_vision/augmentation_levels",
    "big_transfer/resolution",
    "big_transfer/dataset_splits",
    "big_transfer/mixup",
}
FIVE_LABELS = Split(None, "image", "label", None, num_labels=5)
WITHOUT_SOURCE = {"digits.yaml", "mnist.yaml", "small.yaml", "linear_probe.yaml", "lora.yaml"}
OURS = [name for name in NAMES if name.endswith("_small.yaml") or name in WITHOUT_SOURCE]  # settings of our own


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> str:
    """A model to fine-tune whose head has a hidden layer."""
    return str(save_tiny(tmp_path_factory.mktemp("audit") / "model", representation_size=9))


def levels_of(name: str) -> dict[str, list[str]]:
    """The levels of each group of options, the base's first."""
    recipe = read(name)
    groups = levels_of(recipe["base"]) if "base" in recipe else {}
    return groups | {group: list(map(str, levels)) for group, levels in recipe.get("options", {}).items()}


def cited(name: str) -> dict[str, dict[str, str]]:
    """Each original that a recipe cites -> the levels it is compared at; the later of two citations holds."""
    found: dict[str, dict[str, str]] = {}
    for pattern, select in read(name).get("cites", {}).items():
        groups = [field for _, field, _, _ in string.Formatter().parse(pattern) if field]
        for combination in itertools.product(*(levels_of(name)[group] for group in groups)):
            chosen = dict(zip(groups, combination, strict=True))
            for original in fnmatch.filter(ORIGINALS, pattern.format(**chosen)):
                found[original] = chosen | {group: str(level) for group, level in select.items()}
    return found


# Fields that have the same name in both
SAME = """batch_size epochs warmup_steps schedule decay_steps learning_rate final_learning_rate momentum_dtype dropout
    attention_dropout label_smoothing train_split flip image_size""".split()


def ours(settings: FinetuneSettings | PretrainSettings, original: dict[str, Any]) -> dict[str, Any]:
    randaugment = [settings.randaugment_layers, settings.randaugment_magnitude]
    decay = settings.weight_decay
    if settings.weight_decay_convention == "jax":
        decay /= settings.learning_rate
    images: Any = range(original.get("data_size_for_steps") or 0)
    fields = {name: getattr(settings, name) for name in SAME}
    fields |= {
        "steps": count_steps(settings, images) if images and settings.steps is None else settings.steps,
        "optimizer": settings.optimizer,
        "momentum": settings.momentum if settings.optimizer == "sgd" else settings.adam_beta1,
        "weight_decay": decay,
        "clip_norm": settings.max_grad_norm,
        "randaugment": randaugment if settings.randaugment_layers else None,
        "mixup": settings.mixup_alpha,
        "mixup_partner": "the one before, the larger share its own" if settings.mixup_alpha else None,
        "stochastic_depth": settings.drop_path,
        "loss": "softmax" if settings.loss == "auto" else settings.loss,  # each image has one label
        "evaluation_split": settings.eval_split,
        "crop": (settings.crop, settings.image_size) + ((settings.resize,) if settings.crop == "resmall" else ()),
        "crop_area": settings.crop_area if settings.crop == "inception" else None,
    }
    if isinstance(settings, PretrainSettings):
        return fields | pretrained_fields(settings, original)
    model, processor = load_for_finetuning(settings, FIVE_LABELS)
    return fields | {
        "hidden_layer": "tanh" if model.config.representation_size else None,
        "evaluation_preprocessing": describe(processor) if settings.preset else "the model's own",
        **initial_head(model),
    }


def pretrained_fields(settings: PretrainSettings, original: dict[str, Any]) -> dict[str, Any]:
    config = build_config(settings)
    assert isinstance(config, HfViTConfig)
    config.num_labels = original["num_classes"]
    with torch.device("meta"):
        model = HfViTForImageClassification(config)
    rules = expand(vit_table(config), model.state_dict())
    shapes = {rule.theirs: tuple(model.get_parameter(rule.ours).shape) for rule in rules}
    rows = shapes.get("Transformer/posembed_input/pos_embedding", (0, 0))[1]
    small = dataclasses.replace(settings, variant=None, config={**settings.config, **SIZES, "hidden_size": 16})
    trained, processor = build_for_pretraining(small, FIVE_LABELS)
    set_head_bias(trained, settings)
    return {
        "dropout": config.hidden_dropout_prob,
        "attention_dropout": config.attention_probs_dropout_prob,
        "stochastic_depth": config.drop_path_rate,
        "hidden_layer": "tanh" if config.representation_size else None,
        "hidden_layer_width": config.representation_size,
        "pooling": {"cls": "tok", "mean": "gap"}[config.pooling],
        "class_token": config.use_cls_token,
        "position_embedding": {"learned": "learn"}.get(config.position_embedding_type, config.position_embedding_type),
        "position_rows": rows,
        "hidden_size": config.hidden_size,
        "evaluation_preprocessing": describe(processor),
        **initial_head(trained),
    }


def initial_head(model) -> dict[str, Any]:
    bias = set(model.classifier.bias.tolist())
    return {
        "kernel_init": "other" if model.classifier.weight.any() else "zeros",
        "head_bias": round(bias.pop(), 5) if len(bias) == 1 else bias,
    }


def describe(processor: Any) -> str:
    """An image processor in big_vision's words; what they do is tested on images in tests/images."""
    how = (processor.resample, processor.antialias, processor.resize_output)
    if processor.do_center_crop:
        assert how == ("area", False, "truncated")
        return f"resize_small({processor.size['shortest_edge']})|central_crop({processor.crop_size['height']})"
    assert how == (2, False, "float")
    return f"resize({processor.size['height']})"


def theirs(original: dict[str, Any]) -> dict[str, Any]:
    """The fields of an original that are in its file, under our names."""
    names = (*SAME, "steps", "momentum", "clip_norm", "randaugment", "stochastic_depth", "crop_area")
    fields = {name: original[name] for name in names if name in original}
    fields |= {"loss": original["loss"].removesuffix("_xent"), "weight_decay": 0.0, "optimizer": original["optimizer"]}
    fields |= {"mixup": original.get("mixup_p", original.get("mixup_alpha"))}
    if original["weight_decay"]:
        assert "torch's AdamW needs wd / lr" in original["weight_decay_convention"]
        assert original["weight_decay_of"] == ".*/kernel$"
        fields["weight_decay"] = original["weight_decay"] / original["learning_rate"]
    if original["optimizer"] == "scale_by_adam":
        fields |= {"optimizer": "adamw", "momentum_dtype": original["optimizer_options"]["mu_dtype"]}
    elif original["optimizer"] == "big_vision.momentum_hp":  # momentum 0.9 with a bfloat16 accumulator
        fields |= {"optimizer": "sgd", "momentum": 0.9, "momentum_dtype": "bfloat16"}
    if original.get("mixup_alpha"):
        fields["mixup_partner"] = ORIGINALS["big_transfer/mixup"]["tf_and_jax"]
    if fields.get("steps") is None:
        fields.pop("steps", None)
    if "train_preprocessing" in original:
        fields |= big_vision_fields(original)
    elif "test_split" in original:
        size = original["image_size"]
        fields |= {"evaluation_split": original["test_split"], "crop": (original["train_crop"], size)}
        assert original["evaluation_preprocessing"].startswith("squash to image_size, bilinear without antialiasing")
        fields["evaluation_preprocessing"] = f"resize({size})"
    return fields | head_of(original)


def big_vision_fields(original: dict[str, Any]) -> dict[str, Any]:
    operations = original["train_preprocessing"].split("|")
    held_out = original["evaluations"].get("minival", original["evaluations"]["val"])
    evaluated = re.search(r"resize_small\(\d+\)\|central_crop\(\d+\)\|value_range\(-1, 1\)", held_out["preprocessing"])
    assert evaluated
    text = original["train_preprocessing"]
    if inception := re.search(r"inception_crop\((\d+)\)", text):
        crop = ("inception", int(inception[1]))
    else:
        window = re.search(r"resize_small\((\d+)\)\|random_crop\((\d+)\)", text)
        assert window
        crop = ("resmall", int(window[2]), int(window[1]))
    return {
        "crop": crop,
        "flip": "flip_lr" in operations,
        "randaugment": original["randaugment"],
        "evaluation_split": held_out["split"].replace("_", ""),
        "evaluation_preprocessing": evaluated[0].removesuffix("|value_range(-1, 1)"),
        "head_bias": original["head_bias_init"],
    }


def head_of(original: dict[str, Any]) -> dict[str, Any]:
    head = original.get("head", {})
    fields = {name: head[name] for name in ("kernel_init", "hidden_layer") if name in head}
    if "bias_init" in head:
        fields["head_bias"] = head["bias_init"]
    if "not_loaded" in original or "parameters" not in head:  # fine-tuning: the rest of the head is the checkpoint's
        return fields
    shapes = head["parameters"]
    fields |= {name: head[name] for name in ("pooling", "class_token", "position_embedding")}
    return fields | {
        "hidden_layer_width": shapes.get("pre_logits/kernel", [None, None])[1],
        "hidden_size": shapes["head/kernel"][0],
        "position_rows": shapes.get("pos_embedding", [1, 0])[1],
    }


def differences(name: str, checkpoint: str) -> dict[str, dict[str, tuple[Any, Any]]]:
    """Field -> original -> (ours, theirs), where they differ."""
    found: dict[str, dict[str, tuple[Any, Any]]] = {}
    for key, select in cited(name).items():
        original = ORIGINALS[key]
        mine = ours(resolve(name, checkpoint, **select), original)
        for field, value in theirs(original).items():
            if mine[field] != pytest.approx(value) if isinstance(value, float) else mine[field] != value:
                found.setdefault(field, {})[key] = (mine[field], value)
    return found


@pytest.mark.parametrize("name", [name for name in NAMES if "cites" in read(name)])
def test_recipe_equals_its_original_or_states_the_difference(name, checkpoint):
    stated = {field: reason for fields, reason in read(name).get("differs", {}).items() for field in fields.split(", ")}
    assert all(stated.values()), "each difference needs a reason"
    found = differences(name, checkpoint)
    assert {field: found[field] for field in found.keys() - stated.keys()} == {}, "not stated"
    assert stated.keys() - found.keys() == set(), "stated, and none"


def test_every_original_is_cited():
    assert {original for name in NAMES for original in cited(name)} == ORIGINALS.keys() - TABLES


@pytest.mark.parametrize(("name", "select"), [*((name, {}) for name in OURS), ("small.yaml", {"length": "short"})])
def test_our_own_recipes_warm_up_for_at_most_a_quarter_of_any_run(name, select):
    """Where no source fixes the warm-up, a run may have any length."""
    settings = resolve(name, **select)
    for num_steps in (1, 2, 7, 17, 200):
        schedule = build_schedule(settings, num_steps)
        rates = [schedule(step) for step in range(num_steps // 4, num_steps)]
        assert rates == sorted(rates, reverse=True)
        assert rates[0] > 0


@pytest.mark.parametrize("data", ["i21k", "i1k"])
def test_augmentation_of_augreg_by_level_and_by_model(data):
    """`--select augmentation=` wins over what a model brings."""
    table, name = ORIGINALS["big_vision/augmentation_levels"], f"augreg_{data}.yaml"
    for model, default in table["default_by_model"][f"vit_{data}"].items():
        for level in table["randaugment"]:
            settings = resolve(name, model=model, augmentation=level)
            assert settings.randaugment_layers == (table["randaugment"][level] or [0])[0]
            assert settings.randaugment_magnitude == (table["randaugment"][level] or [0, 0])[1]
            assert settings.mixup_alpha == table["mixup_p"][level]
            if level == default:
                assert settings == resolve(name, model=model)


def test_rates_and_crops_that_were_best_in_big_vision():
    for row in ORIGINALS["big_vision/transfer_best"]["rows"]:
        settings = resolve("finetune_big_vision.yaml", dataset=row["dataset"])
        assert settings.learning_rate == row["learning_rate"]
        assert settings.crop == row["crop"].removesuffix("_crop")


def test_resolutions_of_bit():
    """`images=small` is for images of less than 96 x 96 pixels."""
    for row in ORIGINALS["big_transfer/resolution"]["rows"]:
        height, width = row["image"]
        settings = resolve("bit_hyperrule.yaml", size="small", images="small" if height * width < 96 * 96 else "large")
        assert (settings.crop, settings.resize, settings.image_size) == ("random", row["resize"], row["crop"])
        assert settings.flip


def test_splits_of_bit_are_those_of_fine_tuning():
    for dataset, splits in ORIGINALS["big_transfer/dataset_splits"]["splits"].items():
        settings = resolve("finetune_vit_jax.yaml", dataset=dataset)
        assert (settings.train_split, settings.eval_split) == (splits["train"], splits["test"])


@pytest.mark.parametrize("fields", [{}, {"hybrid": True}, {"pooling": "map"}, {"representation_size": 9}])
def test_what_decays_is_what_the_originals_call_kernels(fields):
    """big_vision decays `.*/kernel$`."""
    model = tiny(**fields)
    rules = expand(vit_table(model.config), model.state_dict())
    decayed = {rule.ours for rule in rules if re.fullmatch(".*/kernel", rule.theirs)}
    assert kernel_names(model) == decayed
