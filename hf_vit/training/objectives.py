"""What one forward of training computes: the loss of each sample, and whether it counts as right."""

from typing import Protocol

import numpy as np
import torch

from .losses import cross_entropy, is_correct, make_targets
from .mixing import Mixer


class Objective(Protocol):
    def __call__(
        self, model, batch: dict[str, torch.Tensor], rng: np.random.Generator
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(loss, correct), each (batch,)"""
        ...


class Normalizer:
    """uint8 pixels -> pixel values, on the device and in one step: (pixel / 255 - mean) / std."""

    def __init__(self, mean, std, device: torch.device):
        self.scale = torch.tensor([1 / (255 * channel) for channel in std], device=device).view(-1, 1, 1)
        self.offset = torch.tensor([-m / s for m, s in zip(mean, std, strict=True)], device=device).view(-1, 1, 1)

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        """(batch, height, width, channels) uint8 -> (batch, channels, height, width) float32"""
        return torch.addcmul(self.offset, images.permute(0, 3, 1, 2), self.scale)


class Classification:
    """Cross-entropy with label smoothing, mixup and cutmix."""

    def __init__(self, settings, normalizer: Normalizer, num_labels: int):
        self.loss, self.label_smoothing = settings.loss, settings.label_smoothing
        self.mixer = Mixer(settings.mixup_alpha, settings.cutmix_alpha)
        self.normalizer, self.num_labels = normalizer, num_labels

    def __call__(self, model, batch, rng):
        targets = make_targets(batch["label"], self.num_labels, self.label_smoothing, self.loss)
        pixel_values, targets = self.mixer(self.normalizer(batch["image"]), targets, rng)
        logits = model(pixel_values=pixel_values).logits
        return cross_entropy(logits, targets, self.loss), is_correct(logits.detach(), targets)
