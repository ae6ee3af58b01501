"""Mixup against outputs of big_vision (goldens/training/losses.npz); targets, weights and CutMix by definition."""

import numpy as np
import pytest
import torch

from hf_vit.evaluation.predictions import make_targets
from hf_vit.training.objectives import Normalizer, balanced_weights, cutmix, is_correct, mix, mixup


@pytest.fixture(scope="module")
def originals(goldens):
    """(6, 11) logits and labels, (6, 8, 5, 3) images, and the outputs of `big_vision.utils` and optax."""
    return np.load(goldens / "training" / "losses.npz")


@pytest.mark.parametrize("run", range(4))
def test_mixup_equals_big_vision(originals, run):
    images, labels = (torch.from_numpy(originals[name]) for name in ("images", "labels"))
    mixed, soft = mixup(images.permute(0, 3, 1, 2), labels, float(originals[f"mixup/{run}/weight"]))
    np.testing.assert_allclose(mixed.permute(0, 2, 3, 1), originals[f"mixup/{run}/images"], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(soft, originals[f"mixup/{run}/labels"], rtol=1e-5, atol=1e-5)


def test_mixing_weights_are_distributed_as_in_big_vision(originals):
    rng, images = np.random.default_rng(0), torch.zeros(2, 1, 1, 1)
    weights = [mix(images, torch.eye(2), rng, 0.2)[1][0, 0].item() for _ in range(20_000)]
    ours = np.quantile(weights, np.linspace(0, 1, 101))
    np.testing.assert_allclose(ours, originals["mixup/weights_at_0.2_quantiles"], rtol=0, atol=0.02)


def test_several_labels():
    indicators = torch.zeros(5, 7)
    indicators[:, [1, 4]] = 1
    assert torch.equal(make_targets(indicators, 7), indicators)
    best = torch.zeros(5, 7).scatter(1, torch.tensor([[4], [0], [1], [6], [4]]), 1.0)
    assert is_correct(best, indicators).tolist() == [True, False, True, False, True]


def test_cutmix_is_a_copy_of_the_rectangle():
    """Against slices in NumPy; two draws of the same numbers."""
    images, targets = torch.randn(4, 3, 20, 36), torch.rand(4, 7)
    for seed, weight in enumerate((0.05, 0.3, 0.6, 0.95)):
        mixed, soft = cutmix(images, targets, weight, np.random.default_rng(seed))
        rng, spans = np.random.default_rng(seed), []
        for length in (20, 36):
            half, center = int(length * (1 - weight) ** 0.5) // 2, int(rng.integers(length))
            spans.append(slice(max(center - half, 0), min(center + half, length)))
        expected = images.numpy().copy()
        expected[:, :, spans[0], spans[1]] = np.roll(images.numpy(), 1, axis=0)[:, :, spans[0], spans[1]]
        np.testing.assert_array_equal(mixed, expected)
        kept = 1 - expected[0, 0, spans[0], spans[1]].size / (20 * 36)
        np.testing.assert_allclose(soft, kept * targets + (1 - kept) * targets.roll(1, 0), rtol=1e-6)


def test_mixing_is_off_by_default_and_keeps_an_image_mostly_itself():
    images, targets = torch.randn(4, 3, 5, 6), torch.eye(4)
    assert mix(images, targets, np.random.default_rng(0))[0] is images
    rng = np.random.default_rng(0)
    weights = [mix(images, targets, rng, 0.5)[1][0, 0].item() for _ in range(50)]
    assert min(weights) >= 0.5
    assert len(set(weights)) == 50


def test_normalizer_is_the_processors_formula():
    pixels = torch.randint(0, 256, (2, 4, 5, 3), dtype=torch.uint8)
    mean, std = [0.5, 0.4, 0.3], [0.5, 0.2, 0.1]
    ours = Normalizer(mean, std, torch.device("cpu"))(pixels)
    expected = (pixels.permute(0, 3, 1, 2) / 255 - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)


def test_balanced_classes_count_as_in_scikit_learn():
    class_weight = pytest.importorskip("sklearn.utils.class_weight")
    labels = np.array([0, 0, 0, 2, 2, 3, -1])
    weights = balanced_weights(labels, 5)
    expected = class_weight.compute_class_weight("balanced", classes=np.array([0, 2, 3]), y=labels[labels >= 0])
    assert weights[[0, 2, 3]].tolist() == pytest.approx(expected)
    assert weights[[1, 4]].tolist() == [1, 1]
