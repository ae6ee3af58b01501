"""What one forward of training computes: the loss of each sample, and whether it counts as right."""

from typing import Any, Protocol

import numpy as np
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

from ..models.modeling_masked_patch_prediction import Corruption, sample_corruption
from .losses import cross_entropy, is_correct, make_targets
from .measuring import PADDING, gather, padded
from .mixing import Mixer
from .settings import PretrainSettings, TrainingSettings


class Objective(Protocol):
    """The loss of each sample of a batch, and whether the model is right about it."""

    def __call__(
        self, model: torch.nn.Module, batch: dict[str, torch.Tensor], rng: np.random.Generator
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(loss, correct), each (batch,)"""
        ...


class Normalizer:
    """uint8 pixels -> pixel values, on the device and in one step: (pixel / 255 - mean) / std."""

    def __init__(self, mean: Any, std: Any, device: torch.device):
        mean, std = (torch.tensor(np.atleast_1d(value), dtype=torch.float64).view(-1, 1, 1) for value in (mean, std))
        self.scale = (1 / (255 * std)).float().to(device)
        self.offset = (-mean / std).float().to(device)

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        """(batch, height, width, channels) uint8 -> (batch, channels, height, width) float32"""
        return torch.addcmul(self.offset, images.permute(0, 3, 1, 2), self.scale)


class Classification:
    """Cross-entropy with label smoothing, mixup and cutmix."""

    def __init__(self, settings: TrainingSettings, normalizer: Normalizer, num_labels: int):
        self.loss, self.label_smoothing = settings.loss, settings.label_smoothing
        self.mixer = Mixer(settings.mixup_alpha, settings.cutmix_alpha)
        self.normalizer, self.num_labels = normalizer, num_labels

    def __call__(self, model, batch, rng):
        targets = make_targets(batch["label"], self.num_labels, self.label_smoothing, self.loss)
        pixel_values, targets = self.mixer(self.normalizer(batch["image"]), targets, rng)
        logits = model(pixel_values=pixel_values).logits
        return cross_entropy(logits, targets, self.loss), is_correct(logits.detach(), targets)


class MaskedPatches:
    """Masked patch prediction; see `hf_vit.models.modeling_masked_patch_prediction`."""

    def __init__(self, settings: PretrainSettings, normalizer: Normalizer):
        self.shares = (settings.corruption, settings.mask_share, settings.random_patch_share)
        self.normalizer = normalizer

    def __call__(self, model, batch, rng):
        pixel_values = self.normalizer(batch["image"])
        outputs = self._predict(model, pixel_values)
        return outputs.loss_per_image, outputs.accuracy_per_image.detach()

    def _predict(self, model: Any, pixel_values: torch.Tensor, generator: torch.Generator | None = None) -> Any:
        """Corrupt on the CPU, whose generator is seeded with every step, so that devices do not differ."""
        rows, columns = getattr(model, "module", model).config.grid_of(*pixel_values.shape[-2:])
        corruption = sample_corruption(len(pixel_values), rows * columns, *self.shares, generator=generator)
        return model(pixel_values, Corruption(*(tensor.to(pixel_values.device) for tensor in corruption)))

    @torch.no_grad()
    def evaluate(
        self, accelerator: Accelerator, model: torch.nn.Module, loader: DataLoader, empty: dict[str, torch.Tensor]
    ) -> dict[str, float]:
        """Loss and accuracy on a split whose patches are corrupted the same way every time.

        "histogram_entropy" is what a predictor scores that knows how often each colour occurs and no more.
        """
        model.eval()
        generator = torch.Generator().manual_seed(accelerator.process_index)
        rows: list[torch.Tensor] = []
        counts = torch.zeros(0)
        for batch in padded(loader, empty):
            index = gather(accelerator, batch["index"].to(accelerator.device))
            if bool((index == PADDING).all()):
                break
            outputs = self._predict(model, batch["image"].to(accelerator.device), generator)
            scores = torch.stack([outputs.loss_per_image, outputs.accuracy_per_image], dim=1)
            valid = gather(accelerator, batch["valid"].to(accelerator.device))
            rows.append(gather(accelerator, scores)[(index >= 0) & valid])
            counts = _add_counts(counts, gather(accelerator, outputs.targets)[(index >= 0) & valid])
        loss, accuracy = torch.cat(rows).mean(dim=0).tolist()
        results = {"loss": loss, "patch_accuracy": accuracy, "samples": len(torch.cat(rows))}
        return {**results, "histogram_entropy": _entropy(counts)} if len(counts) else results


def _add_counts(counts: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """How often each class occurs; targets that are no classes are not counted."""
    if targets.is_floating_point():
        return counts
    new = torch.bincount(targets.flatten().cpu(), minlength=len(counts))
    return new + torch.nn.functional.pad(counts, (0, len(new) - len(counts)))


def _entropy(counts: torch.Tensor) -> float:
    """Entropy in nats of the distribution with these counts."""
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * shares.log()).sum())
