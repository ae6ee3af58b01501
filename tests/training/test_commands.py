"""Commands on small real data, in this process: errors, written files, and loading of the results."""

import io
import json
import logging
import math
import shutil
import sys
import time

import datasets
import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor, ViTModel, pipeline

from hf_vit import HfBiTConfig, HfBiTForImageClassification, HfViTForImageClassification, HfViTImageProcessor
from hf_vit.cli import main
from hf_vit.data.splits import Split
from hf_vit.files.messages import user_errors
from hf_vit.models.registry import register_auto_classes
from hf_vit.settings.fields import FinetuneSettings
from hf_vit.training import console
from hf_vit.training.build import load_for_finetuning
from hf_vit.training.objectives import Classification
from hf_vit.training.trainer import Trainer

from ..commands import evaluate, finetune, pretrain
from ..photographs import table_of, write_colors
from ..processes import DIGITS, ONE_STEP, arguments, history, server, weights
from ..tiny_models import SIZES, load_model, save_tiny

SHORT = {**ONE_STEP, "steps": 6}


@pytest.fixture(scope="module")
def colors(tmp_path_factory):
    """An image folder of two colors; one file is broken and one is gray."""
    root = write_colors(tmp_path_factory.mktemp("colors"), ("blue", "red"), train=20, test=9)
    Image.open(root / "train" / "red" / "1.png").convert("L").save(root / "train" / "red" / "1.png")
    (root / "test" / "blue" / "broken.png").write_bytes(b"this is no picture")
    return root


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    """A tiny model with a pre-logits layer and a head for other labels."""
    own = {"num_hidden_layers": 2, "patch_size": 4, "representation_size": 10}
    return save_tiny(tmp_path_factory.mktemp("pretrained") / "tiny", **own)


def finetune_colors(colors, pretrained, output, **changes) -> dict:
    settings = {"model": pretrained, "dataset": colors, "eval_split": "test", "output_dir": output, "steps": 30}
    settings |= {"batch_size": 8, "learning_rate": 0.05, "crop_area": "0.8,1", "num_workers": 0}
    return finetune(arguments(**{**settings, "eval_batch_size": 5, "report_to": "none", **changes}))


@pytest.mark.figures
def test_finetuning_an_image_folder(colors, pretrained, tmp_path):
    output = tmp_path / "out"
    metrics = finetune_colors(colors, pretrained, output)
    assert metrics["accuracy"] == 1.0
    assert (metrics["samples"], metrics["skipped"]) == (18, 1)
    assert json.loads((output / "metrics.json").read_text()) == metrics
    register_auto_classes()
    classify = pipeline("image-classification", model=str(output))
    assert classify(str(colors / "test" / "blue" / "0.png"))[0]["label"] == "blue"
    model = load_model(output / "best")
    assert model.config.representation_size is None
    assert model.config.id2label == {0: "blue", 1: "red"}
    card = json.loads((output / "card_data.json").read_text())
    assert card["metrics"]["accuracy"] == 1.0
    assert card["settings"]["learning_rate"] == 0.05
    for name in card["figures"]:
        with Image.open(output / name) as figure:
            assert len(figure.convert("RGB").getcolors(2**16)) > 20  # lines, letters and their blended edges
    assert len(card["figures"]) == 2
    again = evaluate(arguments(model=output, dataset=colors, eval_batch_size=7, num_workers=0))
    assert again["accuracy"] == 1.0


def test_a_sigmoid_model_is_evaluated_as_in_training(colors, pretrained, tmp_path):
    own = {"steps": 2, "warmup_steps": 0, "loss": "sigmoid", "head_bias": -1}
    metrics = finetune_colors(colors, pretrained, tmp_path / "out", **own)
    again = evaluate(arguments(model=tmp_path / "out", dataset=colors, split="test", num_workers=0))
    assert again["loss"] == pytest.approx(metrics["loss"], rel=1e-5)
    answers = pipeline("image-classification", model=str(tmp_path / "out"))(str(colors / "test" / "blue" / "0.png"))
    assert sum(answer["score"] for answer in answers) != pytest.approx(1, abs=1e-4)


def test_images_with_several_labels_train_with_the_sigmoid_loss(colors, pretrained, tmp_path):
    """Two labels each, and both are near 1; a softmax could give each at most 1/2."""
    files = sorted((colors / "train").glob("*/*.png"))
    images = [{"bytes": file.read_bytes(), "path": None} for file in files]
    tags = datasets.List(datasets.ClassLabel(names=["photograph", "color", "cat"]))
    data = table_of(images, [[0, 1]] * (len(images) - 1) + [[0, 1, 2]], tags)
    data.to_parquet(tmp_path / "train.parquet")
    finetune_colors(tmp_path, pretrained, tmp_path / "out", warmup_steps=0, eval_split="train")
    answers = pipeline("image-classification", model=str(tmp_path / "out"))(str(files[0]))
    assert [answer["score"] > 0.9 for answer in answers] == [True, True, False]
    assert json.loads((tmp_path / "out" / "card_data.json").read_text())["settings"]["loss"] == "sigmoid"


def test_killed_data_worker_is_reported(client, tmp_path):
    code = f"""
        import os, signal
        from hf_vit.cli import main
        from hf_vit.data.augmentation import TrainTransform

        TrainTransform.__call__ = lambda *arguments: os.kill(os.getpid(), signal.SIGKILL)
        raise SystemExit(main({["pretrain", *arguments(**DIGITS, output_dir=tmp_path / "out")]}))
    """
    assert "--num-workers" in client(code, status=2)


def test_tensorboard_has_what_was_logged(tmp_path, monkeypatch):
    """Of more classes than are logged, the one that decides the best evaluation; metrics.json has all."""
    monkeypatch.setattr(console, "_LOGGED_CLASSES", 9)
    changes = {"report_to": "auto", "best_metric": "accuracy/3", "output_dir": tmp_path / "out"}
    metrics = pretrain(arguments(**SHORT | changes))
    events = EventAccumulator(str(tmp_path / "out" / "training")).Reload()
    expected = {entry["step"]: entry["loss"] for entry in history(tmp_path / "out") if "loss" in entry}
    logged = {event.step: event.value for event in events.Scalars("loss")}
    assert logged == pytest.approx(expected)
    assert len(logged) == 6
    tags = set(events.Tags()["scalars"])
    assert {"accuracy", "learning_rate", "eval_accuracy", "images_per_second"} <= tags
    assert [tag for tag in tags if "/" in tag] == ["eval_accuracy/3"]
    assert metrics["best"] == max(event.value for event in events.Scalars("eval_accuracy/3"))
    assert len([name for name in metrics if name.startswith("accuracy/")]) == 10


def test_new_head_is_zero_and_other_weights_are_unchanged(pretrained):
    settings = FinetuneSettings(model=str(pretrained), image_size=[24, 40])
    model, _ = load_for_finetuning(settings, Split(None, "image", "label", ["blue", "red"], 2))
    assert not model.classifier.weight.any()
    assert model.classifier.weight.shape == (2, 14)
    assert model.vit.pooler.dense is None
    assert model.config.image_size == [24, 40]
    original = HfViTForImageClassification.from_pretrained(pretrained)
    for name, tensor in model.vit.state_dict().items():
        if "position_embeddings" not in name:
            assert torch.equal(tensor, original.vit.state_dict()[name]), name


def test_a_model_of_transformers_gets_a_new_head_the_settings_and_another_size(tmp_path):
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 1, "intermediate_size": 22}
    config = ViTConfig(**sizes, image_size=32, num_labels=5)
    for name, theirs in (("classifier", ViTForImageClassification(config)), ("encoder", ViTModel(config))):
        folder = str(tmp_path / name)
        theirs.save_pretrained(folder)
        ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(folder)
        settings = FinetuneSettings(model=folder, image_size=48, dropout=0.25)
        model, processor = load_for_finetuning(settings, Split(None, "image", "label", None, num_labels=3))
        assert (model.config.num_labels, model.config.image_size, model.config.hidden_dropout_prob) == (3, 48, 0.25)
        assert processor.size == {"height": 48, "width": 48}
        assert model.name_or_path == folder
        assert not model.classifier.weight.any()
        kernel = theirs.base_model.embeddings.patch_embeddings.projection.weight
        assert torch.equal(model.vit.embeddings.patch_embeddings.projection.weight, kernel)


def test_preset_sets_resizing_but_not_normalization(colors, pretrained, tmp_path):
    shutil.copytree(pretrained, tmp_path / "model")
    own = {"image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.3, 0.25]}
    HfViTImageProcessor(preset="timm", size=[20, 36], **own).save_pretrained(tmp_path / "model")
    finetune_colors(colors, tmp_path / "model", tmp_path / "out", preset="bit", steps=2)
    saved = HfViTImageProcessor.from_pretrained(tmp_path / "out")
    assert (saved.preset, saved.do_center_crop, saved.size) == ("bit", False, {"height": 20, "width": 36})
    assert {name: list(getattr(saved, name)) for name in own} == own


def test_linear_probe_trains_only_the_head(colors, pretrained, tmp_path):
    finetune_colors(colors, pretrained, tmp_path / "out", linear_probe="true", steps=5)
    trained = HfViTForImageClassification.from_pretrained(tmp_path / "out")
    original = HfViTForImageClassification.from_pretrained(pretrained)
    for name, tensor in trained.vit.state_dict().items():
        assert torch.equal(tensor, original.vit.state_dict()[name]), name
    assert trained.classifier.weight.any()


def test_averaged_weights_are_saved(colors, pretrained, tmp_path):
    for decay in ("none", 0.0, 0.99):
        finetune_colors(colors, pretrained, tmp_path / str(decay), ema_decay=decay, steps=6)
    plain, last, slow = (weights(tmp_path / decay)["classifier.weight"] for decay in ("none", "0.0", "0.99"))
    assert torch.equal(plain, last)
    assert slow.norm() < 0.2 * plain.norm()


def test_low_rank_adapters(colors, pretrained, tmp_path):
    pytest.importorskip("peft", reason="PEFT is an optional extra")
    with pytest.raises(ValueError, match=r"lora.rank"):
        finetune_colors(colors, pretrained, tmp_path / "out", lora_rank=3, freeze="encoder")
    barely = {"lora_rank": 3, "head_bias": -3, "steps": 1, "learning_rate": 1e-9}
    biased = finetune_colors(colors, pretrained, tmp_path / "biased", **barely)
    assert biased["loss"] == pytest.approx(math.log(2), abs=1e-3)
    assert weights(tmp_path / "biased")["classifier.bias"].tolist() == pytest.approx([-3, -3])
    metrics = finetune_colors(colors, pretrained, tmp_path / "out", lora_rank=3, steps=40)
    assert metrics["accuracy"] > 0.9
    merged = HfViTForImageClassification.from_pretrained(tmp_path / "out").vit.state_dict()
    original = HfViTForImageClassification.from_pretrained(pretrained).vit.state_dict()
    moved = {name for name, tensor in merged.items() if not torch.equal(tensor, original[name])}
    assert moved == {f"layers.{n}.attention.{which}_proj.weight" for n in (0, 1) for which in "qv"}


@pytest.mark.parametrize("target", ["mean_color", "pixels"])
def test_masked_patch_prediction_then_finetuning(colors, tmp_path, target, capsys):
    config = {**SIZES, "num_hidden_layers": 2, "image_size": [20, 36], "patch_size": 4}
    settings = {"dataset": colors, "objective": "masked_patch_prediction", "target": target, "eval_split": "test"}
    settings |= {"config": json.dumps(config), "output_dir": tmp_path / "pretrained", "steps": 40, "batch_size": 8}
    settings |= {"optimizer": "adamw", "learning_rate": 0.01, "crop": "none", "num_workers": 0}
    metrics = pretrain(arguments(**settings, eval_every=20, log_every=1, report_to="none"))
    assert f"hf-vit finetune --model {tmp_path / 'pretrained'}" in capsys.readouterr().out
    assert metrics["samples"] == 18
    losses = [entry["loss"] for entry in history(tmp_path / "pretrained") if "loss" in entry]
    assert metrics["loss"] < 0.75 * losses[0]
    if target == "mean_color":
        assert losses[0] == pytest.approx(math.log(512))
    assert finetune_colors(colors, tmp_path / "pretrained", tmp_path / "tuned")["samples"] == 18


# ResNets of BiT


def test_finetuning_a_resnet_with_the_hyper_rule(colors, tmp_path):
    """The recipe, with smaller images and fewer steps."""
    torch.manual_seed(0)
    config = HfBiTConfig(embedding_size=32, depths=[1, 1], image_size=(32, 36), num_labels=11)
    HfBiTForImageClassification(config).save_pretrained(tmp_path / "model")
    HfViTImageProcessor("bit", size=(32, 36)).save_pretrained(tmp_path / "model")
    settings = {"recipe": "bit_hyperrule", "select": "size=medium", "image_size": "32,36", "resize": 40}
    settings |= {"flip": "false", "learning_rate": 0.03, "warmup_steps": 5, "decay_steps": "20,25"}
    metrics = finetune_colors(colors, tmp_path / "model", tmp_path / "out", **settings)
    assert metrics["accuracy"] >= 0.9
    classify = pipeline("image-classification", model=str(tmp_path / "out"))
    assert type(classify.model) is HfBiTForImageClassification
    assert classify(str(colors / "test" / "red" / "0.png"))[0]["label"] == "red"
    again = evaluate(arguments(model=tmp_path / "out", dataset=colors, num_workers=0))
    assert again["accuracy"] == metrics["accuracy"]


def test_pretraining_a_resnet_without_a_variant(colors, tmp_path):
    config = {"embedding_size": 32, "depths": [1, 1], "image_size": 32}
    settings = {"dataset": colors, "output_dir": tmp_path / "out", "config": json.dumps(config), "steps": 2}
    settings |= {"optimizer": "adamw", "learning_rate": 0.001, "weight_decay": 0.1, "batch_size": 4, "dropout": 0}
    pretrain(arguments(**settings, gradient_checkpointing="true", num_workers=0, report_to="none"))
    model = load_model(tmp_path / "out")
    assert model.config.depths == [1, 1]
    assert model.classifier.weight.any()


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


# Each kind of training, and mistakes


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"mixup_alpha": 0.2, "cutmix_alpha": 1.0, "label_smoothing": 0.1},
        {"loss": "sigmoid", "head_bias": -3},
        {"layer_decay": 0.7, "freeze": "[embeddings]", "optimizer": "adamw", "learning_rate": 0.003},
        {"mixed_precision": "bf16", "momentum_dtype": "bfloat16"},
        {"gradient_checkpointing": "true", "randaugment_layers": 2, "randaugment_magnitude": 5},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_every_kind_of_training_learns(colors, pretrained, tmp_path, changes):
    assert finetune_colors(colors, pretrained, tmp_path / "out", steps=60, **changes)["accuracy"] > 0.9


@pytest.mark.slow
@pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++"))), reason="torch.compile needs a C++ compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's compiler about torch
def test_a_compiled_model_takes_the_same_steps(tmp_path):
    losses = []
    settings = {name: value for name, value in SHORT.items() if name != "eval_split"}
    for compiles in (False, True):
        pretrain(arguments(**settings, compile=compiles, output_dir=tmp_path / str(compiles)))
        losses.append([entry["loss"] for entry in history(tmp_path / str(compiles))])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_infinite_loss_stops_with_step_rate_and_checkpoint(tmp_path):
    settings = {**DIGITS, "learning_rate": 1e30, "save_every": 1, "num_workers": 0, "max_grad_norm": "none"}
    with pytest.raises(ValueError, match=r"(nan|inf)\b.*step_0"):
        pretrain(arguments(**settings, output_dir=tmp_path / "out"))
    newest = sorted((tmp_path / "out" / "checkpoints").iterdir())[-1]
    state = json.loads((newest / "state.json").read_text())
    assert all(math.isfinite(entry["loss"]) for entry in state["history"] if "loss" in entry)


@pytest.mark.parametrize(("batch_size", "tried"), [(24, [24, 12, 6]), (14, [14, 7, 1])])
def test_lack_of_memory_halves_the_forward(tmp_path, monkeypatch, batch_size, tried):
    """Forwards of more than 6 lack memory: the same weights as with the found number from the start."""
    compute, sizes = Classification.__call__, []

    def lack_memory(self, model, batch, rng, **patch):
        losses, correct = compute(self, model, batch, rng, **patch)
        sizes.append(len(batch["image"]))
        if sizes[-1] > 6:
            losses.mean().backward()  # gradients that must not stay
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes")
        return losses, correct

    settings = {**ONE_STEP, "dropout": 0.1, "batch_size": batch_size}
    pretrain(arguments(**settings | {"per_device_batch_size": tried[-1]}, output_dir=tmp_path / "plain"))
    monkeypatch.setattr(Classification, "__call__", lack_memory)
    settings |= {"find_batch_size": "true", "per_device_batch_size": batch_size}
    pretrain(arguments(**settings, output_dir=tmp_path / "found"))
    assert sizes == [*tried, *tried[-1:] * (batch_size // tried[-1])]  # the tries and the forwards of the step
    torch.testing.assert_close(weights(tmp_path / "found"), weights(tmp_path / "plain"), rtol=0, atol=0)


def test_a_later_lack_of_memory_ends_the_run(tmp_path, monkeypatch):
    original = Trainer.train_step

    def lack_later(trainer, step):
        if step == 3:
            raise RuntimeError("CUDA out of memory. Tried to allocate 99 bytes")
        original(trainer, step)

    monkeypatch.setattr(Trainer, "train_step", lack_later)
    with pytest.raises(ValueError, match="step 3"):
        pretrain(arguments(**ONE_STEP | {"steps": 5}, output_dir=tmp_path / "late"))


def test_another_process_that_trains_into_the_folder_is_respected(tmp_path):
    """With its lock, which ends with the process; both would write the same files."""
    (tmp_path / "out").mkdir()
    program = "import filelock, time; lock = filelock.FileLock('out/.lock'); lock.acquire()\n"
    other = server().start(program + "open('held', 'x'); time.sleep(60)", cwd=tmp_path)
    while not (tmp_path / "held").exists():
        time.sleep(0.01)
    settings = {**ONE_STEP, "output_dir": tmp_path / "out"}
    for how in ({}, {"resume": "true"}, {"overwrite": "true"}):
        with pytest.raises(ValueError, match="--output-dir"):
            pretrain(arguments(**settings, **how))
    other.kill()
    pretrain(arguments(**settings))
    assert not (tmp_path / "out" / ".lock").exists()


def test_messages_of_huggingface_hub_are_printed_once(tmp_path, caplog, monkeypatch):
    logger = logging.getLogger("huggingface_hub")
    monkeypatch.setattr("hf_vit.cli.training._pretrain", lambda *_: logger.warning("printed by its own handler"))
    assert main(["pretrain", *arguments(**ONE_STEP, output_dir=tmp_path / "out")]) == 0
    propagates = logger.propagate
    logger.propagate = True
    assert not propagates


def test_a_class_name_that_the_terminal_lacks_is_printed_with_escapes(monkeypatch):
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="cp1252")
    monkeypatch.setattr(sys, "stdout", terminal)
    with user_errors("hf-vit"):
        print("classes (Gänseblümchen, 蓮)")
    terminal.flush()
    assert terminal.buffer.getvalue().decode("cp1252") == "classes (Gänseblümchen, \\u84ee)\n"
