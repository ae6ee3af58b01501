"""Losses against torch's own, and what mixing does to images and targets."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from hf_vit.training.losses import cross_entropy, is_correct, make_targets
from hf_vit.training.mixing import Mixer, cutmix, mixup
from hf_vit.training.objectives import Normalizer


@pytest.fixture
def logits():
    return torch.randn(5, 7, generator=torch.Generator().manual_seed(0))


LABELS = torch.tensor([0, 6, 3, 3, 2])


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_softmax_is_torchs_cross_entropy(logits, smoothing):
    losses = cross_entropy(logits, make_targets(LABELS, 7, smoothing))
    torch.testing.assert_close(losses, F.cross_entropy(logits, LABELS, reduction="none", label_smoothing=smoothing))


def test_sigmoid_sums_over_labels(logits):
    targets = make_targets(LABELS, 7)
    by_hand = -(targets * F.logsigmoid(logits) + (1 - targets) * F.logsigmoid(-logits)).sum(dim=1)
    torch.testing.assert_close(cross_entropy(logits, targets, "sigmoid"), by_hand)


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


def test_mixup_mixes_images_and_targets_alike():
    images, targets = torch.randn(4, 3, 5, 6), torch.eye(4)
    mixed, soft = mixup(images, targets, 0.7)
    torch.testing.assert_close(mixed[1], 0.7 * images[1] + 0.3 * images[0])
    torch.testing.assert_close(soft[0], torch.tensor([0.7, 0, 0, 0.3]))


def test_cutmix_targets_follow_the_area():
    images, targets = torch.arange(4.0).view(4, 1, 1, 1).expand(4, 3, 20, 36).clone(), torch.eye(4)
    rng = np.random.default_rng(3)
    for weight in (0.1, 0.5, 0.9):
        mixed, soft = cutmix(images, targets, weight, rng)
        share = (mixed[2, 0] == 2).float().mean().item()
        assert soft[2, 2].item() == pytest.approx(share)
        assert soft[2, 1].item() == pytest.approx(1 - share)


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
