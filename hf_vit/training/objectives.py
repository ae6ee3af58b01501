"""Training objectives: classification and masked patch prediction.

An objective takes the model, a batch and the random generator of the step (classification also a `patch_size`), and
returns (loss, correct), each (batch,).
"""

from collections.abc import Iterable
from typing import Any, TypeAlias

import numpy as np
import torch
from accelerate import Accelerator

from ..evaluation.losses import cross_entropy, make_targets
from ..evaluation.predictions import Batch, collect, model_inputs
from ..models.modeling_masked_patch_prediction import LEVELS, Corruption, sample_corruption
from .losses import Mixer, is_correct
from .settings import PretrainSettings, TrainingSettings


class Normalizer:
    """Normalisation of uint8 pixels on the device, in one operation: (pixel / 255 - mean) / std."""

    def __init__(self, mean: Any, std: Any, device: torch.device):
        mean, std = (torch.tensor(np.atleast_1d(value), dtype=torch.float64).view(-1, 1, 1) for value in (mean, std))
        self.scale = (1 / (255 * std)).float().to(device)
        self.offset = (-mean / std).float().to(device)

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        """Normalise (batch, height, width, channels) uint8 to (batch, channels, height, width) float32.

        Patches (batch, patches, values) keep their shape.
        """
        if images.ndim == 3:  # (batch, patches, patch height * patch width * channels)
            colours = images.unflatten(2, (-1, len(self.scale)))
            return torch.addcmul(self.offset.flatten(), colours, self.scale.flatten()).flatten(2)
        return torch.addcmul(self.offset, images.permute(0, 3, 1, 2), self.scale)

    def inverse(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Return (batch, channels, height, width) as uint8, or patches (batch, patches, values)."""
        scale, offset = self.scale, self.offset
        if pixel_values.ndim == 3:
            repeats = pixel_values.shape[2] // len(scale)
            scale, offset = scale.flatten().repeat(repeats), offset.flatten().repeat(repeats)
        return ((pixel_values - offset) / scale).round().clamp(0, 255).byte()


class Classification:
    """Cross-entropy with label smoothing, mixup, CutMix and class weights (num_labels,)."""

    def __init__(
        self, settings: TrainingSettings, normalizer: Normalizer, num_labels: int, weights: torch.Tensor | None = None
    ):
        self.loss, self.label_smoothing = settings.loss, settings.label_smoothing
        self.mixer = Mixer(settings.mixup_alpha, settings.cutmix_alpha)
        self.normalizer, self.num_labels, self.weights = normalizer, num_labels, weights

    def prepare(self, batch: Batch, rng: np.random.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the pixels as the model sees them and the targets (batch, num_labels), both mixed."""
        targets = make_targets(batch["label"], self.num_labels, self.label_smoothing, self.loss)
        return self.mixer(self.normalizer(batch["image"]), targets, rng)

    def __call__(self, model, batch, rng, **sizes):
        pixel_values, targets = self.prepare(batch, rng)
        logits = model(**{**model_inputs(batch), "pixel_values": pixel_values}, **sizes).logits
        return cross_entropy(logits, targets, self.loss, self.weights), is_correct(logits.detach(), targets)


class MaskedPatches:
    """Masked patch prediction; see `hf_vit.models.modeling_masked_patch_prediction`."""

    def __init__(self, settings: PretrainSettings, normalizer: Normalizer):
        self.shares = (settings.corruption, settings.mask_share, settings.random_patch_share)
        self.normalizer = normalizer

    def prepare(self, batch: Batch, rng: np.random.Generator) -> tuple[torch.Tensor, None]:
        """Return the pixels, which the model corrupts after their embedding; there are no labels."""
        return self.normalizer(batch["image"]), None

    def __call__(self, model, batch, rng):
        pixel_values, _ = self.prepare(batch, rng)
        outputs = self._predict(model, pixel_values)
        return outputs.loss_per_image, outputs.accuracy_per_image.detach()

    def _predict(self, model: Any, pixel_values: torch.Tensor, seeds: list[int] | None = None) -> Any:
        """Run the model with random corruption; it is drawn on the CPU, so that it is the same for all devices.

        Args:
            seeds: one per image, so that its corruption does not depend on the batch.
        """
        rows, columns = getattr(model, "module", model).config.grid_of(*pixel_values.shape[-2:])
        patches = rows * columns
        if seeds is None:
            corruption = sample_corruption(len(pixel_values), patches, *self.shares)
        else:
            generators = [torch.Generator().manual_seed(seed) for seed in seeds]
            single = [sample_corruption(1, patches, *self.shares, generator=generator) for generator in generators]
            corruption = Corruption(*map(torch.cat, zip(*single, strict=True)))
        corruption = Corruption(*(tensor.to(pixel_values.device) for tensor in corruption))
        return model(pixel_values, corruption=corruption)

    def evaluate(
        self,
        accelerator: Accelerator,
        model: torch.nn.Module,
        loader: Iterable[Batch],
        empty: Batch,
    ) -> dict[str, float]:
        """Return loss and accuracy on a split; the corruption of an image depends on its index alone.

        "histogram_entropy" is the loss of a predictor that only knows how often each colour occurs.
        """
        config: Any = getattr(model, "module", model).config
        counts = torch.zeros(LEVELS**config.num_channels, dtype=torch.long, device=accelerator.device)

        def compute(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            outputs = self._predict(model, batch["image"], batch["index"].tolist())
            if not outputs.targets.is_floating_point():  # class numbers, not pixels
                read = ((batch["index"] >= 0) & batch["valid"]).long()
                each = read.view(-1, *[1] * (outputs.targets.ndim - 1)).expand_as(outputs.targets)
                counts.index_add_(0, outputs.targets.flatten(), each.flatten())
            return {"loss": outputs.loss_per_image, "accuracy": outputs.accuracy_per_image}

        scores = collect(accelerator, model, loader, empty, compute)
        counts = torch.as_tensor(accelerator.reduce(counts, "sum")).cpu()
        results = {
            "loss": float(scores["loss"].mean()),
            "patch_accuracy": float(scores["accuracy"].mean()),
            "samples": len(scores["index"]),
        }
        return {**results, "histogram_entropy": _entropy(counts)} if counts.any() else results


Objective: TypeAlias = Classification | MaskedPatches


def _entropy(counts: torch.Tensor) -> float:
    """Entropy in nats of the distribution with these counts."""
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * shares.log()).sum())
