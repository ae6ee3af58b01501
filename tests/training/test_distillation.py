"""The loss of distillation by its definition in NumPy (float64), and runs with a teacher."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.special import expit, rel_entr, softmax

import hf_vit
from hf_vit.models.image_processing_hf_vit import HfViTImageProcessor
from hf_vit.training.objectives import Normalizer, Teacher, distillation_loss

from ..photographs import COLORS, write_colors, write_labeled
from ..processes import history, weights
from ..tiny_models import save_tiny, tiny

pytestmark = pytest.mark.usefixtures("fresh_accelerator")

NAMES = [*COLORS]
RUN = {"steps": 3, "batch_size": 4, "per_device_batch_size": 2, "num_workers": 0, "report_to": "none"}
RUN |= {"learning_rate": 1e-2, "mixup_alpha": 0.5, "ema_decay": 0.5, "eval_split": "train", "save_every": 1}


def divergence(student, teacher, temperature, kind):
    """temperature^2 * KL(teacher || student), (batch,): `dist` of big_vision, and its sum over single labels."""
    if kind == "softmax":
        p, q = (softmax(logits / temperature, axis=1) for logits in (teacher, student))
        return temperature**2 * rel_entr(p, q).sum(axis=1)
    p, q = (expit(logits / temperature) for logits in (teacher, student))
    return temperature**2 * (rel_entr(p, q) + rel_entr(1 - p, 1 - q)).sum(axis=1)


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_loss_and_gradient_are_those_of_the_definition(kind, temperature):
    rng = np.random.default_rng(0)
    student, teacher = rng.normal(0, 3, (2, 5, 7))
    logits = torch.tensor(student, dtype=torch.float32, requires_grad=True)
    losses = distillation_loss(logits, torch.tensor(teacher, dtype=torch.float32), temperature, kind)
    np.testing.assert_allclose(losses.detach(), divergence(student, teacher, temperature, kind), rtol=1e-4, atol=1e-5)
    losses.sum().backward()
    scores = (lambda x: softmax(x, axis=1)) if kind == "softmax" else expit
    expected = temperature * (scores(student / temperature) - scores(teacher / temperature))
    np.testing.assert_allclose(logits.grad, expected, rtol=1e-4, atol=1e-5)
    same = distillation_loss(logits.detach(), logits.detach(), temperature, kind)
    np.testing.assert_allclose(same, np.zeros(5), atol=1e-5)


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return write_colors(tmp_path_factory.mktemp("images"), train=4)


def save_classifier(folder, names, **fields):
    labels = dict(enumerate(names))
    own = {"num_labels": len(labels), "id2label": labels}
    return save_tiny(folder, **own, label2id={name: number for number, name in labels.items()}, **fields)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A student, and a teacher with the classes in another order."""
    root = tmp_path_factory.mktemp("models")
    return save_classifier(root / "student", NAMES), save_classifier(root / "teacher", NAMES[::-1], seed=1)


def test_a_teacher_sees_its_own_preprocessing(tmp_path):
    """Levels of another size, mean and deviation: as the teacher's own processor makes them."""
    size = {"height": 40, "width": 72}
    folder = save_classifier(tmp_path / "teacher", NAMES[::-1], seed=1, image_size=(40, 72))
    processor = HfViTImageProcessor(size=size, image_mean=[0.1, 0.2, 0.3], image_std=[0.4, 0.5, 0.6])
    processor.save_pretrained(folder)
    config = tiny(num_labels=3, id2label=dict(enumerate(NAMES))).config
    normalizer = Normalizer([0.5, 0.4, 0.3], [0.2, 0.3, 0.4], torch.device("cpu"))
    teacher = Teacher(str(folder), config, normalizer, torch.device("cpu"))
    model, _ = hf_vit.load(folder)
    gray = torch.randint(0, 256, (2, 1, 1, 3), dtype=torch.uint8)  # plain colors, which resizing keeps
    own = (gray.float() / 255 - torch.tensor([0.1, 0.2, 0.3])) / torch.tensor([0.4, 0.5, 0.6])
    with torch.no_grad():
        expected = model(own.permute(0, 3, 1, 2).expand(2, 3, 40, 72)).logits[:, [2, 1, 0]]
    logits = teacher(normalizer(gray.expand(2, 20, 36, 3)))
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_a_student_learns_from_its_teacher_alone(images, folders, tmp_path):
    """Not from labels: with the same crops it agrees with a teacher that is wrong about them."""
    student, teacher = folders
    run = {**RUN, "steps": 150, "batch_size": 12, "per_device_batch_size": 12, "crop": "none", "flip": False}
    run |= {"optimizer": "adamw", "learning_rate": 3e-3, "mixup_alpha": 0, "save_every": 150}
    hf_vit.finetune(student, images, tmp_path / "out", teacher=str(teacher), **run | {"ema_decay": None})
    files = sorted(images.rglob("*.png"))
    ours, theirs = (
        [one[0].label for one in hf_vit.predict(str(folder), files, top_k=1)] for folder in (tmp_path / "out", teacher)
    )
    assert np.mean([left == right for left, right in zip(ours, theirs, strict=True)]) > 0.9
    losses = [entry["loss"] for entry in history(tmp_path / "out") if "loss" in entry]
    assert losses[-1] < losses[0] / 5
    assert weights(tmp_path / "out").keys() == weights(student).keys()


@pytest.mark.parametrize(("own", "forwards"), [({"crop": "none", "flip": False, "mixup_alpha": 0}, 12), ({}, 18)])
def test_the_teacher_computes_equal_pixels_once(images, folders, tmp_path, monkeypatch, own, forwards):
    """12 images, 3 epochs in batches of 2."""
    student, teacher = folders
    run = {**RUN, "steps": 9, "save_every": 9, **own}
    calls, compute = [], Teacher.__call__
    monkeypatch.setattr(Teacher, "__call__", lambda self, pixels: calls.append(len(pixels)) or compute(self, pixels))
    hf_vit.finetune(student, images, tmp_path / "out", teacher=str(teacher), **run)
    assert len(calls) == forwards
    if own:
        monkeypatch.setattr("hf_vit.training.objectives._LARGEST_CACHE", 0)
        hf_vit.finetune(student, images, tmp_path / "without", teacher=str(teacher), **run)
        kept, computed = weights(tmp_path / "out"), weights(tmp_path / "without")
        for name, tensor in kept.items():
            torch.testing.assert_close(tensor, computed[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("own", [{}, {"crop": "none", "flip": False, "mixup_alpha": 0}])
def test_resumed_to_the_bit(images, folders, tmp_path, own):
    student, teacher = folders
    for name, lengths in {"whole": [7], "parts": [5, 7]}.items():
        for steps in lengths:
            settings = {**RUN, **own, "steps": steps, "schedule": "constant", "resume": steps > lengths[0]}
            hf_vit.finetune(student, images, tmp_path / name, teacher=str(teacher), **settings)
    whole, parts = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert all(torch.equal(tensor, parts[name]) for name, tensor in whole.items())
    save_classifier(tmp_path / "other", NAMES, seed=2)
    with pytest.raises(ValueError, match="teacher"):
        hf_vit.finetune(
            student, images, tmp_path / "parts", teacher=str(tmp_path / "other"), **{**settings, "steps": 8}
        )


def test_several_labels(tmp_path, folders):
    write_labeled(tmp_path, [";".join(NAMES[: number % 3 + 1]) for number in range(8)])
    teacher = save_classifier(tmp_path / "models" / "teacher", NAMES, seed=1, problem_type="multi_label_classification")
    metrics = hf_vit.finetune(folders[0], tmp_path, tmp_path / "out", teacher=str(teacher), **RUN)
    assert np.isfinite(metrics["loss"])
    with pytest.raises(ValueError, match="sigmoid"):  # a teacher with one label per image
        hf_vit.finetune(folders[0], tmp_path, tmp_path / "other", teacher=str(folders[1]), **RUN)


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"names": [*NAMES[:2], "dog"]}, "dog"),
        ({"names": NAMES[:2]}, "blue, green"),
        ({"num_channels": 1}, "channels"),
        ({"settings": {"preset": "native", "mixup_alpha": 0}}, "teacher"),
        ({"settings": {"label_smoothing": 0.1}}, "label_smoothing"),
        ({"settings": {"class_weights": "balanced"}}, "class_weights"),
    ],
)
def test_refused_before_training(images, folders, tmp_path, wrong, match):
    teacher, own = folders[1], SimpleNamespace(**{"names": NAMES, "settings": {}, "num_channels": 3} | wrong)
    if not own.settings:
        teacher = save_classifier(tmp_path / "teacher", own.names, num_channels=own.num_channels)
    with pytest.raises(ValueError, match=match):
        hf_vit.finetune(folders[0], images, tmp_path / "out", teacher=str(teacher), **RUN | own.settings)
    assert not (tmp_path / "out" / "checkpoints").exists()
