"""Runs from Python, the picture of the first batch, and what a step asks of its device."""

import json
import re
import shutil
from itertools import chain, repeat
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from torch.utils._python_dispatch import TorchDispatchMode

import hf_vit
import hf_vit.evaluation  # noqa: F401
import hf_vit.training  # noqa: F401
from hf_vit.cli.command_line import main
from hf_vit.training import reports, trainer
from hf_vit.training.trainer import Trainer

from ..commands import pretrain
from ..comparing import change_json
from ..photographs import write_labeled
from ..processes import MODEL, ONE_STEP, arguments
from ..tiny_models import save_tiny

EVERY_RUN = {"steps": 1, "batch_size": 4, "num_workers": 0, "report_to": "none", "learning_rate": 1e-3}


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    root = tmp_path_factory.mktemp("flags")
    for name in ("blue", "red"):
        (root / name).mkdir()
        for number in range(4):
            Image.new("RGB", (36, 20), name).save(root / name / f"{number}.png")
    return root


def run_readme(folder):
    """The Python of a folder's README.md loads its model."""
    (code,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    exec(code.replace("FOLDER", str(folder)), {})


def test_folds(flags, tiny, tmp_path):
    """Mean and deviation are NumPy's over the runs; a second call resumes the folds; wrong numbers are refused."""
    run = {**EVERY_RUN, "folds": 4, "report_to": "tensorboard"}
    results = hf_vit.finetune(tiny, flags, tmp_path / "out", **run)
    assert [fold["samples"] for fold in results["folds"]] == [2] * 4
    losses = [fold["loss"] for fold in results["folds"]]
    expected = np.mean(losses), np.std(losses, ddof=1)
    assert (results["mean"]["loss"], results["deviation"]["loss"]) == pytest.approx(expected)
    assert results == json.loads((tmp_path / "out" / "folds.json").read_text(encoding="utf-8"))
    logs = (tmp_path / "out").glob("**/training/events.out*")
    assert sorted(log.parent.parent.name for log in logs) == ["fold_1", "fold_2", "fold_3", "fold_4"]
    assert hf_vit.predict(tmp_path / "out" / "fold_4", sorted(flags.rglob("*.png")))
    run_readme(tmp_path / "out" / "fold_3")
    run_readme(tmp_path / "out" / "fold_3" / "best")
    mine = tmp_path / "out" / "fold_4" / "README.md"
    mine.write_text("# Mine")
    again = hf_vit.finetune(tiny, flags, tmp_path / "out", **run, resume=True)
    assert again["mean"] == results["mean"]
    assert mine.read_text() == "# Mine"
    damaged = shutil.copytree(flags, tmp_path / "damaged")
    (damaged / "blue" / "0.png").write_bytes(b"no image")
    hf_vit.finetune(tiny, damaged, tmp_path / "theirs", **{**run, "folds": 2}, save_for="transformers")
    configs = [json.loads((tmp_path / "theirs" / f"fold_{fold}" / "config.json").read_text()) for fold in (1, 2)]
    assert [config["model_type"] for config in configs] == ["vit", "vit"]
    run_readme(tmp_path / "theirs" / "fold_1")
    with pytest.raises(ValueError, match="4"):
        hf_vit.finetune(tiny, flags, tmp_path / "other", **run | {"folds": 5})
    assert not (tmp_path / "other").exists()


def test_a_run_for_transformers_keeps_its_held_out_images(flags, tiny, tmp_path):
    """Evaluation, calibration and a copy of the folder take the images that the training held out."""
    pictures = tmp_path / "pictures"
    for number in range(5):
        for path in flags.rglob("*.png"):
            copy = pictures / path.parent.name / f"{number}{path.name}"
            copy.parent.mkdir(parents=True, exist_ok=True)
            Image.open(path).point(lambda level, number=number: level + 5 * number).save(copy)
    run = {**EVERY_RUN, "eval_split": "auto", "eval_fraction": 0.5, "save_for": "transformers"}
    trained = hf_vit.finetune(tiny, pictures, tmp_path / "theirs", **run)
    assert trained["samples"] == 20
    main(["export", str(tmp_path / "theirs"), str(tmp_path / "copy"), "--to", "transformers"])
    for folder in ("theirs", "copy"):
        again = hf_vit.evaluate(tmp_path / folder, pictures, num_workers=0)
        assert again["samples"] == 20
        assert again["loss"] == pytest.approx(trained["loss"], rel=1e-5)
    assert hf_vit.calibrate(tmp_path / "copy", pictures, tmp_path / "calibrated", num_workers=0)["images"] == 20


def test_adapters_are_beside_the_merged_model(flags, tiny, tmp_path):
    """PEFT's own loading of the adapter gives the logits of the merged model; the run can be repeated."""
    run = {**EVERY_RUN, "lora_rank": 3, "overwrite": True}
    base = save_tiny(tmp_path / "base")
    for targets in (["all-linear"], ["projection", "fc1"]):
        hf_vit.finetune(base, flags, tmp_path / "out", **run, lora_target_modules=targets)
        merged, _ = hf_vit.load(tmp_path / "out")
        adapted, _ = hf_vit.load(tmp_path / "out" / "adapter")
        pixel_values = torch.ones(1, 3, 20, 36)
        torch.testing.assert_close(adapted(pixel_values).logits, merged(pixel_values).logits)
        run_readme(tmp_path / "out" / "adapter")
    hf_vit.finetune(tiny, flags, tmp_path / "out", **run)  # removes the pre-logits layer: an adapter would not fit
    assert not (tmp_path / "out" / "adapter").exists()
    with pytest.raises(ValueError, match="q_proj"):
        hf_vit.finetune(base, flags, tmp_path / "none", **run, lora_target_modules=["query"])


def test_a_cache_that_cannot_be_written(flags, tiny, tmp_path, monkeypatch):
    """A folder of images needs no cache of its own."""
    monkeypatch.setattr("huggingface_hub.constants.HF_ASSETS_CACHE", "/dev/null/cache")
    assert (
        hf_vit.evaluate(save_tiny(tmp_path / "two", num_labels=2), flags, split="train", num_workers=0)["samples"] == 8
    )


def test_functions_run_one_after_another(flags, tiny, tmp_path):
    """As in a notebook; each run has its own precision, and modules do not hide the functions."""
    metrics = hf_vit.pretrain("digits", tmp_path / "digits", config=MODEL, eval_split="test[:20]", **EVERY_RUN)
    assert metrics["samples"] == 20
    output, own = tmp_path / "out", {"mixed_precision": "bf16", "eval_split": "train", **EVERY_RUN}
    metrics = hf_vit.finetune(tiny, flags, output, **own)
    assert (metrics["best_step"], metrics["samples"]) == (1, 8)
    again = hf_vit.evaluate(output, flags, split="train", num_workers=0)
    assert again["accuracy"] == metrics["accuracy"]
    assert again["loss"] == pytest.approx(metrics["loss"], rel=1e-2)  # in float32
    files = sorted(flags.rglob("*.png"))
    found = list(hf_vit.predict(output, files, top_k=2, batch_size=3))
    assert [{one.label for one in image} for image in found] == [{"blue", "red"}] * 8
    assert hf_vit.embed(hf_vit.load(output), files).shape == (8, 14)
    command = json.loads((output / "card_data.json").read_text())["command"]  # of the model card
    called = eval(command, {"hf_vit": SimpleNamespace(finetune=lambda *given, **settings: (given, settings))})
    assert called == ((str(tiny), str(flags), str(output)), own)


@pytest.mark.parametrize("changes", [{}, {"preset": "native", "token_drop": 0.2}, {"mixup_alpha": 0.2}], ids=str)
def test_the_first_batch_is_drawn_as_the_model_sees_it(flags, tiny, tmp_path, monkeypatch, changes):
    """Colors come back from a normalization of its own, and each image has its class."""
    own = {"image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.3, 0.25]}
    shutil.copytree(tiny, tmp_path / "model")
    change_json(tmp_path / "model" / "preprocessor_config.json", **own)
    drawn, original = [], reports.write_batch
    monkeypatch.setattr(reports, "write_batch", lambda *given: (drawn.append(given), original(*given)))
    hf_vit.finetune(tmp_path / "model", flags, tmp_path / "out", eval_split=None, **EVERY_RUN, **changes)
    with Image.open(tmp_path / "out" / "train_batch.png") as sheet:
        assert sheet.size[0] > 200
    [(images, captions, _)] = drawn
    assert len(images) == len(captions) == 4
    for image, caption in zip(images, captions, strict=True):
        red, blue = (image[..., channel].astype(float).mean() / 255 for channel in (0, 2))
        if "mixup_alpha" in changes:
            share = float(caption.split("red ")[1].split(",")[0]) if "red " in caption else float(caption == "red")
            assert red == pytest.approx(share, abs=0.11)  # a share below 0.1 is not shown
        else:
            assert (red > blue) == (caption == "red")
            gray = (image == 128).all(axis=-1).mean()  # dropped patches
            assert gray == pytest.approx(0.2 if changes else 0, abs=0.02)
            assert set(np.unique(image)) <= {0, 255, 128}


class LastStepError(Exception):
    """End of a run whose result does not matter."""


def train_steps(output, monkeypatch, dataset="digits", **settings):
    """Take three training steps; a checkpoint or an evaluation is never due."""
    train_step = Trainer.train_step

    def take(self, step):
        train_step(self, step)
        if step == 2:
            raise LastStepError

    monkeypatch.setattr(Trainer, "train_step", take)
    monkeypatch.setattr(trainer, "draw_batch", lambda *_: None)  # reads the first batch, once in a run
    rare = dict.fromkeys(("log_every", "eval_every", "save_every"), 1000)
    own = {**EVERY_RUN, "steps": 5, "ema_decay": 0.9, "schedule": "constant", **rare, **settings}
    with pytest.raises(LastStepError):
        hf_vit.pretrain(dataset, output, **own)


KINDS = {
    "supervised": {"optimizer": "adamw", "momentum_dtype": "bfloat16", "mixup_alpha": 0.2, "cutmix_alpha": 0.2},
    "sigmoid": {"loss": "sigmoid", "dropout": 0.1, "drop_path": 0.1, "class_weights": "balanced"},
    "accumulated": {"per_device_batch_size": 2, "momentum_dtype": "bfloat16", "randaugment_layers": 2},
    "muon": {"optimizer": "muon", "gradient_checkpointing": True},
    "masked": {"objective": "masked_patch_prediction"},
    "flexible": {"patch_sizes": [2, 4]},
    "native": {"preset": "native", "token_drop": 0.3},
    "relative": {"config": {**MODEL, "position_embedding_type": "relative"}},
    "sincos2d": {"config": {**MODEL, "position_embedding_type": "sincos2d", "hidden_size": 16}},
    "hybrid": {"variant": "R26+S/32", "image_size": 64},
    "bit": {"variant": "R50x1", "image_size": 64},
    "distilled": {"teacher": "teacher", "mixup_alpha": 0.2},
    "distilled, fixed pixels": {"teacher": "teacher", "crop": "none", "flip": False},
    "several labels": {"dataset": "labeled"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_reads_nothing_from_its_device(tmp_path, monkeypatch, kind):
    """A tensor of the device "meta" has no values, so that reading one is an error."""
    monkeypatch.delenv("ACCELERATE_USE_CPU")
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "meta")
    monkeypatch.chdir(tmp_path)
    if "teacher" in KINDS[kind]:
        save_tiny(Path("teacher"), num_labels=10, image_size=(40, 72), id2label=dict(enumerate("0123456789")))
    if "dataset" in KINDS[kind]:
        write_labeled(Path("labeled"), ["dog", "cat;dog"] * 4)
    config = {} if "variant" in KINDS[kind] else {"config": MODEL}
    train_steps("out", monkeypatch, **config | KINDS[kind])


class Operations(TorchDispatchMode):
    """Record what this thread computes: the bytes of CPU tensors that each operation makes; views make none."""

    free = frozenset("detach alias empty empty_like _unsafe_view _local_scalar_dense lift_fresh set_".split())

    def __init__(self):
        super().__init__()
        self.copied = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.namespace == "aten" and not func.is_view and func.overloadpacket.__name__ not in self.free:
            tensors = result if isinstance(result, list | tuple) else [result]
            on_cpu = [one for one in tensors if isinstance(one, torch.Tensor) and one.device.type == "cpu"]
            self.copied.append(sum(tensor.nbytes for tensor in on_cpu))
        return result


@pytest.mark.slow
def test_operations_of_an_optimizer_step(tmp_path, monkeypatch):
    """With averages and compact AdamW; 2,916 operations if each parameter is updated by itself."""
    counts, train_step = [], Trainer.train_step

    def counted(self, step):
        with Operations() as operations:
            train_step(self, step)
        counts.append(len(operations.copied))

    monkeypatch.setattr(Trainer, "train_step", counted)
    settings = {"optimizer": "adamw", "momentum_dtype": "bfloat16", "weight_decay": 0.1, "variant": "B/16"}
    train_steps(tmp_path / "out", monkeypatch, **settings, image_size=32)
    assert counts[1] == counts[2] < 1000


@pytest.mark.parametrize("augment_on", ["cpu", "device"])
def test_the_training_thread_copies_no_images(tmp_path, monkeypatch, augment_on):
    """Workers and their threads join and pin a batch; only the order of RandAugment's operations is left to sort."""
    monkeypatch.delenv("ACCELERATE_USE_CPU")
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "meta")
    shares, next_batch = [], Trainer.next_batch

    def counted(self):
        with Operations() as operations:
            batch = next_batch(self)
        shares.append(sum(operations.copied) / sum(tensor.nbytes for tensor in batch.values()))
        return batch

    monkeypatch.setattr(Trainer, "next_batch", counted)
    settings = {"config": {**MODEL, "image_size": 64}, "num_workers": 1, "randaugment_layers": 2, "eval_split": None}
    train_steps(tmp_path / "out", monkeypatch, augment_on=augment_on, **settings)
    assert len(shares) == 3
    assert max(shares) < 0.1  # 8.7 to 11.2 if it joins, pins and casts them itself


@pytest.mark.parametrize(
    "changes",
    [{"eval_split": "none", "best_metric": "loss"}, {"best_metric": "acuracy"}, {"best_metric": "accuracy/ten"}],
)
def test_settings_that_need_an_evaluation_are_rejected_first(tmp_path, changes):
    """The same folder is then free for another try."""
    with pytest.raises(ValueError, match="best_metric"):
        pretrain(arguments(**ONE_STEP | changes, output_dir=tmp_path / "out"))
    assert not (tmp_path / "out").exists() or not any((tmp_path / "out").iterdir())


def test_a_run_without_evaluation_has_no_best(tmp_path):
    """metrics.json is JSON as other programs read it, too; and the recipe says what "auto" was."""
    assert pretrain(arguments(**ONE_STEP | {"eval_split": "none"}, output_dir=tmp_path / "out"))["best"] is None
    json.loads((tmp_path / "out" / "metrics.json").read_text(), parse_constant=pytest.fail)
    assert yaml.safe_load((tmp_path / "out" / "recipe.yaml").read_text())["compile"] is False  # on a CPU


def test_early_stopping(tmp_path, capsys, monkeypatch):
    """The metrics are invented; the second evaluation is the best."""
    losses = chain([3.0, 1.0, 2.0, 2.5, 2.2], repeat(0.5))
    monkeypatch.setattr(Trainer, "evaluate", lambda trainer: {"loss": next(losses), "accuracy": 0.5, "samples": 9})
    settings = {**ONE_STEP, "steps": 12, "eval_every": 2, "save_every": 50, "output_dir": tmp_path / "out"}
    settings |= {"best_metric": "loss", "early_stopping": 3}
    metrics = pretrain(arguments(**settings))
    assert (metrics["best_step"], metrics["best"], metrics["best_metric"]) == (4, 1.0, "loss")
    printed = capsys.readouterr().out
    assert re.search(r"\b10\b.*\b12\b", printed)
    assert "50.00" in printed
    again = pretrain(arguments(**settings, resume="true"))  # nothing more to do, and 0.5 is what the model has
    assert again["best_step"] == 4
    settings |= {"best_metric": "accuracy/3", "overwrite": "true"}
    with pytest.raises(ValueError, match="accuracy/3"):
        pretrain(arguments(**settings))


def test_of_equal_accuracies_the_lower_loss_is_best(tmp_path, monkeypatch):
    """The metrics are invented."""
    losses = chain([3.0, 1.0, 2.0], repeat(2.5))
    monkeypatch.setattr(Trainer, "evaluate", lambda trainer: {"loss": next(losses), "accuracy": 0.5, "samples": 9})
    settings = {**ONE_STEP, "steps": 8, "eval_every": 2, "save_every": 50, "output_dir": tmp_path / "out"}
    metrics = pretrain(arguments(**settings, best_metric="accuracy"))
    assert (metrics["best_step"], metrics["best"]) == (4, 0.5)
