"""Objectives: mixing, targets and weights, distillation, and a patch size for each step.

Mixup is compared with outputs of big_vision (goldens/training/losses.npz), patch sizes with its sequence, and the rest
with the definitions in NumPy and scikit-learn.
"""

import json

import numpy as np
import pytest
import torch
from scipy.special import expit, rel_entr, softmax

import hf_vit
from hf_vit.inference.predictions import make_targets
from hf_vit.models.image_processing_hf_vit import HfViTImageProcessor
from hf_vit.settings.fields import FinetuneSettings
from hf_vit.training import objectives
from hf_vit.training.build import compile_model, prepare_patch_sizes
from hf_vit.training.objectives import Normalizer, Teacher, mix

from ..commands import evaluate, pretrain
from ..photographs import COLORS, write_colors, write_labeled
from ..processes import ONE_STEP, arguments, history, weights
from ..tiny_models import load_model, save_tiny, tiny


@pytest.fixture(scope="module")
def originals(goldens):
    """(6, 11) logits and labels, (6, 8, 5, 3) images, and the outputs of `big_vision.utils` and optax."""
    return np.load(goldens / "training" / "losses.npz")


@pytest.mark.parametrize("run", range(4))
def test_mixup_equals_big_vision(originals, run):
    images, labels = (torch.from_numpy(originals[name]) for name in ("images", "labels"))
    mixed, soft = objectives.mixup(images.permute(0, 3, 1, 2), labels, float(originals[f"mixup/{run}/weight"]))
    np.testing.assert_allclose(mixed.permute(0, 2, 3, 1), originals[f"mixup/{run}/images"], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(soft, originals[f"mixup/{run}/labels"], rtol=1e-5, atol=1e-5)


def test_mixing_weights_are_distributed_as_in_big_vision(originals):
    """An image stays mostly itself; without a setting nothing is mixed."""
    rng, images = np.random.default_rng(0), torch.zeros(2, 1, 1, 1)
    assert mix(images, torch.eye(2), rng)[0] is images
    weights = [mix(images, torch.eye(2), rng, 0.2)[1][0, 0].item() for _ in range(20_000)]
    assert min(weights) >= 0.5
    ours = np.quantile(weights, np.linspace(0, 1, 101))
    np.testing.assert_allclose(ours, originals["mixup/weights_at_0.2_quantiles"], rtol=0, atol=0.02)


def test_targets_of_several_labels():
    indicators = torch.zeros(5, 7)
    indicators[:, [1, 4]] = 1
    assert torch.equal(make_targets(indicators, 7), indicators)
    best = torch.zeros(5, 7).scatter(1, torch.tensor([[4], [0], [1], [6], [4]]), 1.0)
    assert objectives.is_correct(best, indicators).tolist() == [True, False, True, False, True]


def test_cutmix_is_a_copy_of_the_rectangle():
    """Against slices in NumPy; two draws of the same numbers."""
    images, targets = torch.randn(4, 3, 20, 36), torch.rand(4, 7)
    for seed, weight in enumerate((0.05, 0.3, 0.6, 0.95)):
        mixed, soft = objectives.cutmix(images, targets, weight, np.random.default_rng(seed))
        rng, spans = np.random.default_rng(seed), []
        for length in (20, 36):
            half, center = int(length * (1 - weight) ** 0.5) // 2, int(rng.integers(length))
            spans.append(slice(max(center - half, 0), min(center + half, length)))
        expected = images.numpy().copy()
        expected[:, :, spans[0], spans[1]] = np.roll(images.numpy(), 1, axis=0)[:, :, spans[0], spans[1]]
        np.testing.assert_array_equal(mixed, expected)
        kept = 1 - expected[0, 0, spans[0], spans[1]].size / (20 * 36)
        np.testing.assert_allclose(soft, kept * targets + (1 - kept) * targets.roll(1, 0), rtol=1e-6)


def test_normalizer_is_the_processors_formula():
    pixels = torch.randint(0, 256, (2, 4, 5, 3), dtype=torch.uint8)
    mean, std = [0.5, 0.4, 0.3], [0.5, 0.2, 0.1]
    ours = Normalizer(HfViTImageProcessor(image_mean=mean, image_std=std), torch.device("cpu"))(pixels)
    expected = (pixels.permute(0, 3, 1, 2) / 255 - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)


def test_balanced_classes_count_as_in_scikit_learn():
    class_weight = pytest.importorskip("sklearn.utils.class_weight")
    labels = np.array([0, 0, 0, 2, 2, 3, -1])
    weights = objectives.balanced_weights(labels, 5)
    expected = class_weight.compute_class_weight("balanced", classes=np.array([0, 2, 3]), y=labels[labels >= 0])
    assert weights[[0, 2, 3]].tolist() == pytest.approx(expected)
    assert weights[[1, 4]].tolist() == [1, 1]


# Distillation


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
    losses = objectives.distillation_loss(logits, torch.tensor(teacher, dtype=torch.float32), temperature, kind)
    np.testing.assert_allclose(losses.detach(), divergence(student, teacher, temperature, kind), rtol=1e-4, atol=1e-5)
    losses.sum().backward()
    scores = (lambda x: softmax(x, axis=1)) if kind == "softmax" else expit
    expected = temperature * (scores(student / temperature) - scores(teacher / temperature))
    np.testing.assert_allclose(logits.grad, expected, rtol=1e-4, atol=1e-5)
    same = objectives.distillation_loss(logits.detach(), logits.detach(), temperature, kind)
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
    student = HfViTImageProcessor(image_mean=[0.5, 0.4, 0.3], image_std=[0.2, 0.3, 0.4])
    normalizer = Normalizer(student, torch.device("cpu"))
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
        np.array([one[0].label for one in hf_vit.predict(str(folder), files, top_k=1)])
        for folder in (tmp_path / "out", teacher)
    )
    assert (ours == theirs).mean() > 0.9
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
        torch.testing.assert_close(computed, kept, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("own", [{}, {"crop": "none", "flip": False, "mixup_alpha": 0}])
def test_resumed_to_the_bit(images, folders, tmp_path, own):
    student, teacher = folders
    for name, lengths in {"whole": [7], "parts": [5, 7]}.items():
        for steps in lengths:
            settings = {**RUN, **own, "steps": steps, "schedule": "constant", "resume": steps > lengths[0]}
            hf_vit.finetune(student, images, tmp_path / name, teacher=str(teacher), **settings)
    torch.testing.assert_close(weights(tmp_path / "parts"), weights(tmp_path / "whole"), rtol=0, atol=0)
    other = save_classifier(tmp_path / "other", NAMES, seed=2)
    with pytest.raises(ValueError, match="teacher"):
        hf_vit.finetune(student, images, tmp_path / "parts", teacher=str(other), **{**settings, "steps": 8})


def test_a_teacher_of_several_labels(tmp_path, folders):
    write_labeled(tmp_path, [";".join(NAMES[: number % 3 + 1]) for number in range(8)])
    teacher = save_classifier(tmp_path / "models" / "teacher", NAMES, seed=1, problem_type="multi_label_classification")
    metrics = hf_vit.finetune(folders[0], tmp_path, tmp_path / "out", teacher=str(teacher), **RUN)
    assert np.isfinite(metrics["loss"])
    with pytest.raises(ValueError, match="sigmoid"):  # a teacher with one label per image
        hf_vit.finetune(folders[0], tmp_path, tmp_path / "other", teacher=str(folders[1]), **RUN)


@pytest.mark.parametrize(
    ("names", "channels", "match"),
    [([*NAMES[:2], "dog"], 3, "dog"), (NAMES[:2], 3, "blue, green"), (NAMES, 1, "channels")],
)
def test_a_teacher_of_other_images_is_refused_before_training(images, folders, tmp_path, names, channels, match):
    teacher = save_classifier(tmp_path / "teacher", names, num_channels=channels)
    with pytest.raises(ValueError, match=match):
        hf_vit.finetune(folders[0], images, tmp_path / "out", teacher=str(teacher), **RUN)
    assert not (tmp_path / "out" / "checkpoints").exists()


# Patch sizes


# `choice(v, p, mkrng(-1, -1, step))` of big_vision's trainers/proj/flexi/common.py at 0127fb6, for steps 1 to 24:
# v=(5, 6, 8, 10, 12, 15, 16, 20, 24, 30) with p all 1, which its configurations have; and v=(5, 8, 10), p=(1, 2, 5).
ORIGINAL = [12, 16, 20, 30, 30, 16, 6, 6, 24, 12, 16, 20, 6, 12, 20, 6, 6, 24, 30, 24, 15, 5, 12, 15]
WEIGHTED = [10, 10, 10, 10, 10, 10, 8, 8, 10, 10, 10, 10, 8, 10, 10, 8, 8, 10, 10, 10, 10, 5, 10, 10]

PATCHES = {**ONE_STEP, "steps": 4, "patch_sizes": "4,2,8"}


def drawn(**settings) -> list[int]:
    return [objectives.draw_patch_size(FinetuneSettings(**settings), step)["patch_size"] for step in range(24)]


def test_the_sequence_is_the_originals():
    counts = [5, 6, 8, 10, 12, 15, 16, 20, 24, 30]
    assert drawn(patch_sizes=counts) == ORIGINAL
    assert drawn(patch_sizes=[240 // count for count in counts]) == [240 // count for count in ORIGINAL]
    assert drawn(patch_sizes=[5, 8, 10], patch_size_weights=[1, 2, 5]) == WEIGHTED
    assert drawn(patch_sizes=counts, seed=1) != ORIGINAL
    assert objectives.draw_patch_size(FinetuneSettings(), 3) == {}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's compiler about torch
def test_a_compiled_model_has_a_graph_for_each_of_many_patch_sizes():
    """torch.compile gives up after 8 graphs by default; Dynamo counts those that it made."""
    sizes = (1, 2, 3, 4, 5, 6, 10, 12, 15)
    model = tiny(image_size=60, patch_size=10, num_hidden_layers=1, pooling="mean", use_cls_token=False)
    prepare_patch_sizes(model, sizes)
    made, images = [], torch.randn(1, 3, 60, 60)
    with torch.compiler.config.patch(recompile_limit=torch.compiler.config.recompile_limit):
        compile_model(model, sizes)
        model.compile(backend=lambda graph, inputs: made.append(graph) or graph.forward)  # ours needs no compiler
        for size in sizes:
            model(images, patch_size=size)
    torch.compiler.reset()
    assert len(made) == len(sizes)


def test_a_run_draws_and_evaluates_patch_sizes(tmp_path):
    metrics = pretrain(arguments(**PATCHES, output_dir=tmp_path / "out"))
    each = [metrics[f"accuracy_at_patch_{size}"] for size in (4, 2, 8)]
    assert len(set(each)) > 1
    assert metrics["accuracy"] == pytest.approx(sum(each) / 3)
    assert metrics["samples"] == 103
    model = load_model(tmp_path / "out")
    assert (model.config.kernel_size, model.config.stored_grid, model.config.patch_size) == ((4, 4), (2, 2), 4)
    where = {"model": tmp_path / "out", "dataset": "digits", "split": "test[:103]", "num_workers": 0}
    assert evaluate(arguments(**where, patch_size=8))["accuracy"] == pytest.approx(each[2])


def test_patch_sizes_that_the_model_lacks_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"\b8\b.*\b3\b"):  # pixels of an image
        pretrain(arguments(**PATCHES | {"patch_sizes": "4,3"}, output_dir=tmp_path / "out"))
    resnet = json.dumps({"depths": [1], "image_size": 8})
    with pytest.raises(ValueError, match="HfBiTForImageClassification"):
        pretrain(arguments(**PATCHES | {"config": resnet}, output_dir=tmp_path / "out"))
