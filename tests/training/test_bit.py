"""BiT ResNets go through the same training as the rest."""

import json

import pytest
import torch
from transformers import pipeline

from hf_vit import HfBiTConfig, HfBiTForImageClassification, HfViTImageProcessor
from hf_vit.scripts.evaluate import evaluate
from hf_vit.scripts.finetune import finetune
from hf_vit.scripts.pretrain import pretrain

from ..paths import RECIPES
from ..photographs import write_colors
from ..processes import arguments
from ..tiny_models import load_model

pytestmark = pytest.mark.usefixtures("fresh_accelerator")


@pytest.fixture(scope="module")
def colors(tmp_path_factory):
    return write_colors(tmp_path_factory.mktemp("colors"), ("blue", "red"), train=16, test=5)


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pretrained")
    torch.manual_seed(0)
    config = HfBiTConfig(embedding_size=32, depths=[1, 1], image_size=(32, 36), num_labels=11)
    HfBiTForImageClassification(config).save_pretrained(folder)
    HfViTImageProcessor("bit", size=(32, 36)).save_pretrained(folder)
    return folder


def test_finetuning_with_the_hyper_rule(colors, pretrained, tmp_path):
    """The recipe, with smaller images and fewer steps."""
    settings = {"recipe": RECIPES / "bit_hyperrule_medium.yaml", "model": pretrained, "dataset": colors}
    settings |= {"eval_split": "test", "output_dir": tmp_path / "out", "image_size": "32,36", "resize": 40}
    settings |= {"batch_size": 8, "learning_rate": 0.03, "steps": 30, "warmup_steps": 5, "decay_steps": "20,25"}
    settings |= {"flip": "false", "num_workers": 0, "report_to": "none"}
    metrics = finetune(arguments(**settings))
    assert metrics["accuracy"] >= 0.9
    model = load_model(tmp_path / "out")
    assert type(model) is HfBiTForImageClassification
    assert model.config.id2label == {0: "blue", 1: "red"}
    classify = pipeline("image-classification", model=str(tmp_path / "out"))
    assert classify(str(colors / "test" / "red" / "0.png"))[0]["label"] in ("blue", "red")
    again = evaluate(arguments(model=tmp_path / "out", dataset=colors, num_workers=0))
    assert again["accuracy"] == metrics["accuracy"]


def test_pretraining_without_a_variant(colors, tmp_path):
    config = {"embedding_size": 32, "depths": [1, 1], "image_size": 32}
    settings = {"dataset": colors, "output_dir": tmp_path / "out", "config": json.dumps(config), "steps": 2}
    settings |= {"optimizer": "adamw", "learning_rate": 0.001, "weight_decay": 0.1, "batch_size": 4, "dropout": 0}
    settings |= {"gradient_checkpointing": "true", "num_workers": 0, "report_to": "none"}
    pretrain(arguments(**settings))
    model = load_model(tmp_path / "out")
    assert model.config.depths == [1, 1]
    assert not torch.equal(model.classifier.weight, torch.zeros_like(model.classifier.weight))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dropout": 0.1}, "dropout"),
        ({"drop_path": 0.2}, "--drop-path"),
        ({"objective": "masked_patch_prediction"}, "HfBiTConfig"),
    ],
)
def test_settings_that_a_resnet_lacks_are_refused(colors, tmp_path, changes, message):
    settings = {"dataset": colors, "output_dir": tmp_path / "out", "variant": "R50x1", "steps": 1, "batch_size": 2}
    with pytest.raises(ValueError, match=message):
        pretrain(arguments(**settings, **changes))
