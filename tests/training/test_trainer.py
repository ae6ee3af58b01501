"""Runs from Python, and the picture of the first batch."""

import numpy as np
import pytest
from PIL import Image

import hf_vit
import hf_vit.evaluation
import hf_vit.training
from hf_vit.models.image_processing_hf_vit import HfViTImageProcessor
from hf_vit.training import trainer
from hf_vit.training.recipes import SettingsError

from ..launching import MODEL
from ..tiny_models import save_tiny

pytestmark = pytest.mark.usefixtures("fresh_accelerator")

EVERY_RUN = {"steps": 1, "batch_size": 4, "num_workers": 0, "report_to": "none", "learning_rate": 1e-3}


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    """Two classes of images: blue and red."""
    root = tmp_path_factory.mktemp("flags")
    for name, color in {"blue": (0, 0, 255), "red": (255, 0, 0)}.items():
        (root / name).mkdir()
        for number in range(4):
            Image.new("RGB", (36, 20), color).save(root / name / f"{number}.png")
    return root


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("model") / "tiny")


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


@pytest.mark.parametrize("wrong", [{"learning_rat": 0.1}, {"learning_rate": "high"}, {"steps": 1, "epochs": 2}])
def test_a_wrong_setting_of_a_function_is_named(flags, tmp_path, wrong):
    with pytest.raises(SettingsError, match=next(iter(wrong))):
        hf_vit.finetune("model", flags, tmp_path / "out", **{**EVERY_RUN, **wrong})
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("changes", [{}, {"preset": "native", "token_drop": 0.2}, {"mixup_alpha": 0.2}], ids=str)
def test_the_first_batch_is_drawn_as_the_model_sees_it(flags, tiny, tmp_path, monkeypatch, changes):
    """Colors come back from a normalization of its own, and each image has its class."""
    model, processor = hf_vit.load(tiny)
    own = {"image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.3, 0.25]}
    model.save_pretrained(tmp_path / "model")
    HfViTImageProcessor(**{**processor.to_dict(), **own}).save_pretrained(tmp_path / "model")
    drawn = []
    original = trainer.write_batch
    monkeypatch.setattr(trainer, "write_batch", lambda *given: (drawn.append(given), original(*given)))
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
