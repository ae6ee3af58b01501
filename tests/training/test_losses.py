"""Losses and mixup against outputs of big_vision and optax (goldens/training/losses.npz), and by definition."""

import numpy as np
import pytest
import torch

from hf_vit.evaluation.losses import cross_entropy, make_targets
from hf_vit.training.losses import Mixer, balanced_weights, cutmix, is_correct, mixup
from hf_vit.training.objectives import Normalizer


@pytest.fixture
def logits():
    return torch.randn(5, 7, generator=torch.Generator().manual_seed(0))


LABELS = torch.tensor([0, 6, 3, 3, 2])


@pytest.fixture(scope="module")
def originals(goldens):
    """(6, 11) logits and labels, (6, 8, 5, 3) images, and the outputs of `big_vision.utils` and optax."""
    return np.load(goldens / "training" / "losses.npz")


@pytest.mark.parametrize("labels", ["one_hot", "mixed", "multi"])
@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_losses_and_gradients_equal_big_vision(originals, kind, labels):
    name = {"one_hot": "classes", "mixed": "mixup/1/labels", "multi": "multi_labels"}[labels]
    targets = make_targets(torch.from_numpy(originals[name]), 11, kind=kind)
    logits = torch.from_numpy(originals["logits"]).requires_grad_()
    losses = cross_entropy(logits, targets, kind)
    losses.mean().backward()
    expected = originals[f"{kind}_xent/{labels}"]
    np.testing.assert_allclose(losses.detach(), expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(logits.grad, originals[f"{kind}_xent/{labels}/grad"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("smoothing", [0.1, 0.3])
def test_smoothed_labels_equal_optax(originals, smoothing):
    expected = originals[f"optax_smooth_labels/{smoothing}"]
    ours = make_targets(torch.from_numpy(originals["classes"]), 11, smoothing)
    np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("smoothing", [0.1, 0.3])
def test_smoothing_of_the_other_classes_alone(originals, smoothing):
    """`weighted_softmax_xent` of big_vision, which no configuration uses: ours with 11/10 of the smoothing."""
    targets = make_targets(torch.from_numpy(originals["classes"]), 11, smoothing * 11 / 10)
    losses = cross_entropy(torch.from_numpy(originals["logits"]), targets)
    np.testing.assert_allclose(losses, originals[f"weighted_softmax_xent/{smoothing}"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("run", range(4))
def test_mixup_equals_big_vision(originals, run):
    images, labels = (torch.from_numpy(originals[name]) for name in ("images", "labels"))
    mixed, soft = mixup(images.permute(0, 3, 1, 2), labels, float(originals[f"mixup/{run}/weight"]))
    np.testing.assert_allclose(mixed.permute(0, 2, 3, 1), originals[f"mixup/{run}/images"], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(soft, originals[f"mixup/{run}/labels"], rtol=1e-5, atol=1e-5)


def test_mixing_weights_are_distributed_as_in_big_vision(originals):
    mixer, rng, images = Mixer(mixup_alpha=0.2), np.random.default_rng(0), torch.zeros(2, 1, 1, 1)
    weights = [mixer(images, torch.eye(2), rng)[1][0, 0].item() for _ in range(20_000)]
    ours = np.quantile(weights, np.linspace(0, 1, 101))
    np.testing.assert_allclose(ours, originals["mixup/weights_at_0.2_quantiles"], rtol=0, atol=0.02)


def test_head_bias_of_minus_ten_starts_with_a_small_sigmoid_loss():
    """21,843 labels at logit -10 cost about 10 + 21,842 * exp(-10), not 21,843 * log 2."""
    targets = make_targets(torch.tensor([5]), 21_843)
    loss = cross_entropy(torch.full((1, 21_843), -10.0), targets, "sigmoid")
    assert loss.item() == pytest.approx(10 + 21_843 * np.log1p(np.exp(-10)), rel=1e-3)


def test_several_labels(logits):
    indicators = torch.zeros(5, 7)
    indicators[:, [1, 4]] = 1
    assert torch.equal(make_targets(indicators, 7), indicators)
    best = torch.zeros(5, 7).scatter(1, torch.tensor([[4], [0], [1], [6], [4]]), 1.0)
    assert is_correct(best, indicators).tolist() == [True, False, True, False, True]


def test_smoothing_of_sigmoid_targets_goes_to_a_half():
    targets = make_targets(torch.tensor([1]), 3, 0.2, "sigmoid")
    torch.testing.assert_close(targets, torch.tensor([[0.1, 0.9, 0.1]]))


def test_cutmix_targets_follow_the_area():
    images, targets = torch.arange(4.0).view(4, 1, 1, 1).expand(4, 3, 20, 36).clone(), torch.eye(4)
    rng = np.random.default_rng(3)
    for weight in (0.1, 0.5, 0.9):
        mixed, soft = cutmix(images, targets, weight, rng)
        share = (mixed[2, 0] == 2).float().mean().item()
        assert soft[2, 2].item() == pytest.approx(share)
        assert soft[2, 1].item() == pytest.approx(1 - share)


def test_cutmix_is_a_copy_of_the_rectangle():
    """Against slices in NumPy; two draws of the same numbers."""
    images, targets = torch.randn(4, 3, 20, 36), torch.rand(4, 7)
    for seed, weight in enumerate((0.05, 0.3, 0.6, 0.95)):
        mixed, soft = cutmix(images, targets, weight, np.random.default_rng(seed))
        rng, spans = np.random.default_rng(seed), []
        for length in (20, 36):
            half, centre = int(length * (1 - weight) ** 0.5) // 2, int(rng.integers(length))
            spans.append(slice(max(centre - half, 0), min(centre + half, length)))
        expected = images.numpy().copy()
        expected[:, :, spans[0], spans[1]] = np.roll(images.numpy(), 1, axis=0)[:, :, spans[0], spans[1]]
        np.testing.assert_array_equal(mixed, expected)
        kept = 1 - expected[0, 0, spans[0], spans[1]].size / (20 * 36)
        np.testing.assert_allclose(soft, kept * targets + (1 - kept) * targets.roll(1, 0), rtol=1e-6)


def test_mixer_is_off_by_default_and_keeps_an_image_mostly_itself():
    images, targets = torch.randn(4, 3, 5, 6), torch.eye(4)
    assert Mixer()(images, targets, np.random.default_rng(0))[0] is images
    mixer, rng = Mixer(mixup_alpha=0.5), np.random.default_rng(0)
    weights = [mixer(images, targets, rng)[1][0, 0].item() for _ in range(50)]
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


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_weighted_losses_against_torch(kind):
    torch.manual_seed(0)
    logits, labels, weights = torch.randn(6, 4), torch.tensor([0, 3, 1, 1, 2, 0]), torch.tensor([0.5, 2, 1, 3])
    targets = make_targets(labels, 4, kind=kind)
    losses = cross_entropy(logits, targets, kind, weights)
    if kind == "softmax":
        expected = torch.nn.functional.cross_entropy(logits, labels, weights, reduction="none")
    else:
        judge = torch.nn.BCEWithLogitsLoss(weights, reduction="none")
        expected = judge(logits, targets).sum(1)
    torch.testing.assert_close(losses, expected)
