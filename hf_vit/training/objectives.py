"""Training objectives: classification (mixup, CutMix, class weights), regression, distillation, masked patches.

An objective is called with the model, a batch and the random generator of the step (classification and regression also
with a `patch_size`). It returns the loss and the accuracy, or another `measure`, of each sample, both (batch,).
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import torch
from accelerate import Accelerator
from torch.distributions import Categorical
from torch.nn import functional as F

from ..data.devices import send
from ..data.labels import names_of
from ..inference.predictions import Batch, EvaluationBatches, collect, cross_entropy, make_targets, model_inputs
from ..inference.regression import TargetScale, regression_loss
from ..loading import load
from ..models.image_processing_hf_vit import Normalize, flip_channels
from ..models.modeling_masked_patch_prediction import LEVELS, Corruption, sample_corruption
from ..models.scores import score_function
from ..models.sizes import as_pair
from ..settings.fields import PretrainSettings, TrainingSettings

_LARGEST_CACHE = 2**28  # logits, 1 GiB


def balanced_weights(labels: np.ndarray, num_labels: int) -> torch.Tensor:
    """Return class weights (num_labels,): images / (classes with images * images of the class).

    This is "balanced" of scikit-learn's `compute_class_weight`; a class without images gets weight 1.

    Args:
        labels: class indices (images,); a number below 0 means no label.
    """
    counts = np.bincount(labels[labels >= 0], minlength=num_labels)
    weights = counts.sum() / ((counts > 0).sum() * np.maximum(counts, 1))
    return torch.from_numpy(np.where(counts > 0, weights, 1.0)).float()


def is_correct(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return whether the class with the highest logit has the highest target (or one of them): (batch,) bool."""
    top = targets.gather(1, logits.argmax(dim=1, keepdim=True))[:, 0]
    return top == targets.amax(dim=1)


def mix(
    pixel_values: torch.Tensor,
    targets: torch.Tensor,
    rng: np.random.Generator,
    mixup_alpha: float = 0.0,
    cutmix_alpha: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mix each image of a batch with its neighbor, by mixup or CutMix, and their targets in the same way.

    As in big_vision (`get_mixup` in utils.py), a batch has one mixing weight, and the partner of an image is the one
    before it. The weight of mixup is max(a, 1 - a) with a from Beta(alpha, alpha), so that the image itself dominates.
    With both alphas set, each batch is mixed by one of the two, with equal probability.

    Args:
        pixel_values, targets: (batch, channels, height, width) and (batch, num_labels)
        mixup_alpha, cutmix_alpha: parameters of the Beta distributions; 0: off.
    """
    if not mixup_alpha and not cutmix_alpha:
        return pixel_values, targets
    if not cutmix_alpha or (mixup_alpha and rng.random() < 0.5):
        weight = rng.beta(mixup_alpha, mixup_alpha)
        return mixup(pixel_values, targets, max(weight, 1 - weight))
    return cutmix(pixel_values, targets, rng.beta(cutmix_alpha, cutmix_alpha), rng)


def mixup(pixel_values: torch.Tensor, targets: torch.Tensor, weight: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Mixup (arXiv 1710.09412): `weight` of each image plus 1 - `weight` of the one before it."""
    return _mix(pixel_values, targets, weight, weight, (0, 0, 0, 0))


def cutmix(
    pixel_values: torch.Tensor, targets: torch.Tensor, weight: float, rng: np.random.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """CutMix (arXiv 1905.04899): a rectangle of 1 - `weight` of the area comes from the image before it.

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
    """Mix each image with the one before it: `weight` outside the box, 0 inside; and `target_weight` for the targets.

    Weights and box are tensors, so that one compiled graph serves all values.

    Args:
        box: (top, bottom, left, right)
    """
    device = pixel_values.device
    weights = send(torch.tensor([weight, target_weight]), device)
    top, bottom, left, right = send(torch.tensor(box), device)
    rows, columns = (torch.arange(length, device=device) for length in pixel_values.shape[-2:])
    inside = ((rows >= top) & (rows < bottom)).unsqueeze(1) & ((columns >= left) & (columns < right))
    kept = torch.where(inside, 0, weights[0])  # (height, width)
    return pixel_values.roll(1, 0).lerp(pixel_values, kept), targets.roll(1, 0).lerp(targets, weights[1])


def _clipped_span(length: int, share: float, rng: np.random.Generator) -> tuple[int, int]:
    half = int(length * share) // 2
    center = int(rng.integers(length))
    return max(center - half, 0), min(center + half, length)


def draw_patch_size(settings: TrainingSettings, step: int) -> dict[str, int]:
    """Return the `patch_size` argument for the forwards of an optimizer step (from 0); {} for a fixed patch size.

    FlexiViT (arXiv 2212.08013) draws one for each step. The sequence is that of big_vision (trainers/proj/flexi/,
    train.py and common.py). Each step has its own generator, whose seed is (experiment ID, work unit ID, step), with
    steps counted from 1. Outside Google, both IDs are 0; here, the first one is the run's seed, 0 by default.
    """
    if not settings.patch_sizes:
        return {}
    weights = np.array(settings.patch_size_weights or [1] * len(settings.patch_sizes))
    generator = np.random.default_rng((settings.seed, 0, step + 1))
    return {"patch_size": int(generator.choice(settings.patch_sizes, p=weights / weights.sum()))}


class Normalizer:
    """The last steps of an image processor for a batch of uint8 pixels on the device."""

    def __init__(self, processor: Any, device: torch.device):
        self.scale, self.offset = Normalize.of(processor).scale_and_offset(device)
        self.flips_channels = processor.do_flip_channel_order

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        """Normalize (batch, height, width, channels) uint8 to (batch, channels, height, width) float32.

        Patches (batch, patches, values) keep their shape.
        """
        if images.ndim == 3:  # (batch, patches, patch height * patch width * channels)
            colors = images.unflatten(2, (-1, len(self.scale)))
            return torch.addcmul(self.offset.flatten(), colors, self.scale.flatten()).flatten(2)
        images = images.permute(0, 3, 1, 2)
        if self.flips_channels:
            images = flip_channels(images)
        return torch.addcmul(self.offset, images, self.scale)

    def inverse(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Convert normalized pixels, (batch, channels, height, width) or (batch, patches, values), back to uint8."""
        scale, offset = self.scale, self.offset
        if pixel_values.ndim == 3:
            repeats = pixel_values.shape[2] // len(scale)
            scale, offset = scale.flatten().repeat(repeats), offset.flatten().repeat(repeats)
        levels = ((pixel_values - offset) / scale).round().clamp(0, 255).byte()
        return flip_channels(levels) if self.flips_channels else levels


class Classification:
    """Cross-entropy with label smoothing, mixup, CutMix and class weights (num_labels,)."""

    measure = "accuracy"

    def __init__(
        self, settings: TrainingSettings, normalizer: Normalizer, num_labels: int, weights: torch.Tensor | None = None
    ):
        self.loss, self.label_smoothing = settings.loss, settings.label_smoothing
        self.alphas = settings.mixup_alpha, settings.cutmix_alpha
        self.normalizer, self.num_labels, self.weights = normalizer, num_labels, weights

    def prepare(self, batch: Batch, rng: np.random.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the normalized pixels and the targets (batch, num_labels), both mixed."""
        targets = make_targets(batch["label"], self.num_labels, self.label_smoothing, self.loss)
        return mix(self.normalizer(batch["image"]), targets, rng, *self.alphas)

    def __call__(self, model, batch, rng, **sizes):
        pixel_values, targets = self.prepare(batch, rng)
        logits = model(**{**model_inputs(batch), "pixel_values": pixel_values}, **sizes).logits
        losses = self.compute_losses(logits, targets, pixel_values, batch)
        return losses, is_correct(logits.detach(), targets)

    def compute_losses(
        self, logits: torch.Tensor, targets: torch.Tensor, pixel_values: torch.Tensor, batch: Batch
    ) -> torch.Tensor:
        """Return the loss of each sample, (batch,)."""
        return cross_entropy(logits, targets, self.loss, self.weights)


class MaskedPatches:
    """Masked patch prediction; see `hf_vit.models.modeling_masked_patch_prediction`."""

    measure = "accuracy"

    def __init__(self, settings: PretrainSettings, normalizer: Normalizer):
        self.shares = (settings.corruption, settings.mask_share, settings.random_patch_share)
        self.normalizer = normalizer

    def prepare(self, batch: Batch, rng: np.random.Generator) -> tuple[torch.Tensor, None]:
        """Return the normalized pixels; the model masks patches after embedding them. There are no targets."""
        return self.normalizer(batch["image"]), None

    def __call__(self, model, batch, rng):
        pixel_values, _ = self.prepare(batch, rng)
        outputs = self._predict(model, pixel_values)
        return outputs.loss_per_image, outputs.accuracy_per_image.detach()

    def _predict(self, model: Any, pixel_values: torch.Tensor, seeds: list[int] | None = None) -> Any:
        """Run the model with random corruption, which is drawn on the CPU to be the same on all devices.

        Args:
            seeds: one per image, which makes its corruption independent of the batch.
        """
        rows, columns = getattr(model, "module", model).config.grid_of(*pixel_values.shape[-2:])
        patches = rows * columns
        if seeds is None:
            corruption = sample_corruption(len(pixel_values), patches, *self.shares)
        else:
            generators = [torch.Generator().manual_seed(seed) for seed in seeds]
            single = [sample_corruption(1, patches, *self.shares, generator=generator) for generator in generators]
            corruption = Corruption(*map(torch.cat, zip(*single, strict=True)))
        device = pixel_values.device
        corruption = Corruption(*(send(tensor, device) for tensor in corruption))
        return model(pixel_values, corruption=corruption)

    def evaluate(
        self, accelerator: Accelerator, model: torch.nn.Module, batches: EvaluationBatches
    ) -> dict[str, float]:
        """Return loss and accuracy on a split; the corruption of an image depends on its index alone.

        "histogram_entropy" is the loss of a model that always predicts the frequencies of the colors.
        """
        config: Any = getattr(model, "module", model).config
        counts = torch.zeros(LEVELS**config.num_channels, dtype=torch.long, device=accelerator.device)

        def compute(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            outputs = self._predict(model, batch["image"], batch["index"].tolist())
            if not outputs.targets.is_floating_point():  # class indices, not pixels
                is_image = (batch["index"] >= 0).long().to(outputs.targets.device)  # not padding
                weights = is_image.view(-1, *[1] * (outputs.targets.ndim - 1)).expand_as(outputs.targets)
                counts.index_add_(0, outputs.targets.flatten(), weights.flatten())
            return {"loss": outputs.loss_per_image, "accuracy": outputs.accuracy_per_image}

        scores = collect(accelerator, model, batches, compute)
        counts = torch.as_tensor(accelerator.reduce(counts, "sum")).cpu()
        results = {
            "loss": float(scores["loss"].mean()),
            "patch_accuracy": float(scores["accuracy"].mean()),
            "samples": len(scores["index"]),
        }
        if counts.any():
            results["histogram_entropy"] = float(Categorical(counts.double()).entropy())
        return results


class Regression:
    """Squared error or Huber loss of standardized targets.

    Args:
        scale: of the targets, which the head computes standardized.
    """

    measure = "mae"

    def __init__(self, settings: TrainingSettings, normalizer: Normalizer, scale: TargetScale):
        self.loss = settings.loss
        self.delta = settings.huber_delta
        self.normalizer = normalizer
        self.scale = scale

    def prepare(self, batch: Batch, rng: np.random.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the normalized pixels and the standardized targets (batch, targets)."""
        return self.normalizer(batch["image"]), self.scale.standardize(batch["label"])

    def __call__(self, model, batch, rng, **sizes):
        pixel_values, targets = self.prepare(batch, rng)
        values = model(**{**model_inputs(batch), "pixel_values": pixel_values}, **sizes).logits
        errors = self.scale.restore(values.detach().float()) - batch["label"]
        return regression_loss(values, targets, self.loss, self.delta), errors.abs().mean(dim=1)


Objective: TypeAlias = Classification | MaskedPatches | Regression


class Teacher:
    """A frozen classifier. It is not saved with the student.

    Args:
        name: as in `hf_vit.load`.
        config: the student's configuration.
        normalizer: that of the student's pixels.

    Raises:
        ValueError: the teacher has other classes, another task or another number of channels.
    """

    def __init__(self, name: str, config: Any, normalizer: Normalizer, device: torch.device):
        self.model: Any
        self.model, processor = load(name)
        self.model.to(device).eval().requires_grad_(False)
        theirs = self.model.config
        self.order = torch.tensor(_match_classes(names_of(config), names_of(theirs), name), device=device)
        own, other = ((one.num_channels, score_function(one)) for one in (config, theirs))
        if own != other:
            raise ValueError(
                f"the number of channels and the score function are {own[0]}, {own[1]} of the student, and {other[0]}, "
                f"{other[1]} of the teacher {name}; choose a teacher with the same"
            )
        self.size = as_pair(theirs.image_size)
        # Converts pixels normalized for the student to the teacher's normalization: both are affine in the levels
        teacher = Normalizer(processor, device)
        self.flips_channels = teacher.flips_channels != normalizer.flips_channels
        scale, offset = normalizer.scale, normalizer.offset
        if self.flips_channels:
            scale, offset = flip_channels(scale), flip_channels(offset)
        self.scale = teacher.scale / scale
        self.offset = teacher.offset - offset * self.scale

    @torch.no_grad()
    def __call__(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Return the logits (batch, num_labels) of the student's classes for the student's pixels."""
        if tuple(pixel_values.shape[-2:]) != self.size:
            pixel_values = F.interpolate(pixel_values, self.size, mode="bilinear", antialias=True)
        if self.flips_channels:
            pixel_values = flip_channels(pixel_values)
        pixel_values = torch.addcmul(self.offset, pixel_values, self.scale)
        return self.model(pixel_values.to(self.model.dtype)).logits[:, self.order]


def _match_classes(ours: list[str], theirs: list[str], teacher: str) -> list[int]:
    """Return the teacher's class index of each class of the student."""
    if ours == theirs:
        return list(range(len(ours)))
    if sorted(ours) != sorted(theirs) or len(set(ours)) < len(ours):
        raise ValueError(
            f"the teacher {teacher} has {len(theirs)} classes ({', '.join(theirs[:3])}, ...), but the student has "
            f"{len(ours)} ({', '.join(ours[:3])}, ...): fine-tune the teacher on the same classes first"
        )
    return [theirs.index(name) for name in ours]


def distillation_loss(
    logits: torch.Tensor, teacher_logits: torch.Tensor, temperature: float = 1.0, kind: str = "softmax"
) -> torch.Tensor:
    """Return temperature^2 * KL(teacher || student) of each sample, in float32.

    For softmax, this is `dist` with kind "kl" in big_vision (evaluators/proj/distill/distance.py). The factor makes the
    size of the gradient independent of the temperature (Hinton et al., arXiv 1503.02531).

    Args:
        logits, teacher_logits: (batch, num_labels); they are divided by the temperature.
        kind: "softmax", or "sigmoid": the sum of the divergences of all labels.

    Returns:
        (batch,)
    """
    student, teacher = logits.float() / temperature, teacher_logits.float() / temperature
    if kind == "sigmoid":
        cross, own = (
            F.binary_cross_entropy_with_logits(one, teacher.sigmoid(), reduction="none") for one in (student, teacher)
        )
        terms = cross - own
    else:
        log_student, log_teacher = student.log_softmax(dim=-1), teacher.log_softmax(dim=-1)
        terms = F.kl_div(log_student, log_teacher, reduction="none", log_target=True)
    return temperature**2 * terms.sum(dim=-1)


class Distillation(Classification):
    """Divergence of the student's probabilities from the teacher's, on the same mixed crops; labels are not used.

    It is function matching ("Knowledge distillation: A good teacher is patient and consistent", arXiv 2106.05237). If
    an image has the same pixels in every epoch (no random crop, flip or mixing), the teacher's logits are cached.

    Args:
        num_images: number of training images; the teacher's logits are cached if they fit into 1 GiB. 0: no cache.
    """

    def __init__(
        self,
        settings: TrainingSettings,
        normalizer: Normalizer,
        num_labels: int,
        teacher: Callable[[torch.Tensor], torch.Tensor],
        num_images: int = 0,
    ):
        super().__init__(settings, normalizer, num_labels)
        self.teacher, self.temperature = teacher, settings.teacher_temperature
        keeps = settings.crop == "none" and not (
            settings.flip or settings.randaugment_layers or settings.mixup_alpha or settings.cutmix_alpha
        )
        self.cache: dict[int, torch.Tensor] | None = (
            {} if keeps and 0 < num_images * num_labels <= _LARGEST_CACHE else None
        )

    def compute_losses(
        self, logits: torch.Tensor, targets: torch.Tensor, pixel_values: torch.Tensor, batch: Batch
    ) -> torch.Tensor:
        teacher_logits = self.teacher_logits(pixel_values, batch["row"])
        return distillation_loss(logits, teacher_logits, self.temperature, self.loss)

    def teacher_logits(self, pixel_values: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return the teacher's logits (batch, num_labels), computed or cached.

        Cached logits are computed one image at a time, because their last bits depend on the batch, which differs
        after a resume.

        Args:
            rows: (batch,) numbers of the images in the training split.
        """
        if self.cache is None:
            return self.teacher(pixel_values)
        for number, pixels in zip(rows.tolist(), pixel_values, strict=True):
            if number not in self.cache:
                self.cache[number] = self.teacher(pixels[None])[0]
        return torch.stack([self.cache[number] for number in rows.tolist()])
