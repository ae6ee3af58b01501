"""Class weights of the loss; mixup and CutMix of a batch, on the device. The losses are in `evaluation.losses`."""

import numpy as np
import torch


def balanced_weights(labels: np.ndarray, num_labels: int) -> torch.Tensor:
    """Return class weights (num_labels,): images / (classes with images * images of the class).

    This is "balanced" of scikit-learn's `compute_class_weight`; a class without images has weight 1.

    Args:
        labels: class numbers (images,); a number below 0 means no label.
    """
    counts = np.bincount(labels[labels >= 0], minlength=num_labels)
    weights = counts.sum() / ((counts > 0).sum() * np.maximum(counts, 1))
    return torch.from_numpy(np.where(counts > 0, weights, 1.0)).float()


def is_correct(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Tell for each sample whether the highest logit is at one of the highest targets: (batch,) bool."""
    top = targets.gather(1, logits.argmax(dim=1, keepdim=True))[:, 0]
    return top == targets.amax(dim=1)


class Mixer:
    """Mixup or CutMix of each image of a batch with its neighbour, and of the targets.

    As in big_vision (`get_mixup` in utils.py), a batch has one mixing weight, and the partner of an image is the one
    before it. The weight of mixup is max(a, 1 - a) with a from Beta(alpha, alpha), so that the image itself dominates.
    With both alphas set, each batch is mixed by one of the two, with equal probability.

    Args:
        mixup_alpha, cutmix_alpha: parameters of the Beta distributions; 0: off.
    """

    def __init__(self, mixup_alpha: float = 0.0, cutmix_alpha: float = 0.0):
        self.mixup_alpha = mixup_alpha
        self.cutmix_alpha = cutmix_alpha

    def __call__(
        self, pixel_values: torch.Tensor, targets: torch.Tensor, rng: np.random.Generator
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Mix (batch, channels, height, width) and (batch, num_labels); the shapes stay the same."""
        if not self.mixup_alpha and not self.cutmix_alpha:
            return pixel_values, targets
        if not self.cutmix_alpha or (self.mixup_alpha and rng.random() < 0.5):
            weight = rng.beta(self.mixup_alpha, self.mixup_alpha)
            return mixup(pixel_values, targets, max(weight, 1 - weight))
        return cutmix(pixel_values, targets, rng.beta(self.cutmix_alpha, self.cutmix_alpha), rng)


def mixup(pixel_values: torch.Tensor, targets: torch.Tensor, weight: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Mixup (arXiv 1710.09412): `weight` of each image plus 1 - `weight` of the one before it."""
    return _mix(pixel_values, targets, weight, weight, (0, 0, 0, 0))


def cutmix(
    pixel_values: torch.Tensor, targets: torch.Tensor, weight: float, rng: np.random.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """CutMix (arXiv 1905.04899): a rectangle of 1 - `weight` of the area comes from the image before.

    The rectangle is clipped at the borders; the targets are mixed by its clipped area.
    """
    height, width = pixel_values.shape[-2:]
    side = (1 - weight) ** 0.5
    top, bottom = _clipped_span(height, side, rng)
    left, right = _clipped_span(width, side, rng)
    kept = 1 - (bottom - top) * (right - left) / (height * width)
    return _mix(pixel_values, targets, 1, kept, (top, bottom, left, right))


def _mix(
    pixel_values: torch.Tensor, targets: torch.Tensor, weight: float, target_weight: float, box: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keep `weight` of each pixel outside the box, 0 inside it, and `target_weight` of the targets.

    Weights and box are tensors, so that one compiled graph serves every draw.

    Args:
        box: (top, bottom, left, right)
    """
    device = pixel_values.device
    weights = torch.tensor([weight, target_weight]).to(device, non_blocking=True)
    top, bottom, left, right = torch.tensor(box).to(device, non_blocking=True)
    rows, columns = (torch.arange(length, device=device) for length in pixel_values.shape[-2:])
    inside = ((rows >= top) & (rows < bottom)).unsqueeze(1) & ((columns >= left) & (columns < right))
    kept = torch.where(inside, 0, weights[0])  # (height, width)
    return pixel_values.roll(1, 0).lerp(pixel_values, kept), targets.roll(1, 0).lerp(targets, weights[1])


def _clipped_span(length: int, share: float, rng: np.random.Generator) -> tuple[int, int]:
    half = int(length * share) // 2
    centre = int(rng.integers(length))
    return max(centre - half, 0), min(centre + half, length)
