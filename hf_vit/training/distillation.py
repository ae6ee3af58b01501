"""Knowledge distillation by function matching: a student learns the probabilities of a trained teacher.

"Knowledge distillation: A good teacher is patient and consistent", arXiv 2106.05237. Teacher and student get the same
crops with the same mixup; labels are not used. If an image has the same pixels in every epoch (no random crop, flip or
mixing), the teacher's logits are cached.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from ..data.labels import names_of
from ..evaluation.predictions import Batch
from ..loading import load
from ..models.configuration_hf_vision import score_function
from ..models.configuration_hf_vit import as_pair
from ..settings.fields import TrainingSettings
from .objectives import Classification, Normalizer

_LARGEST_CACHE = 2**28  # logits, 1 GiB


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
        for what, own, other in (
            ("number of channels", theirs.num_channels, config.num_channels),
            ("score function", score_function(theirs), score_function(config)),
        ):
            if own != other:
                raise ValueError(
                    f"the {what} of the teacher {name} is {own}, but the student's is {other}; choose a teacher "
                    "with the same task and number of channels"
                )
        self.size = as_pair(theirs.image_size)
        # Converts pixels normalized for the student to the teacher's normalization: both are affine in the levels
        own = Normalizer(processor.image_mean, processor.image_std, device)
        self.scale = own.scale / normalizer.scale
        self.offset = own.offset - normalizer.offset * self.scale

    @torch.no_grad()
    def __call__(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Return the logits (batch, num_labels) of the student's classes for the student's pixels."""
        if tuple(pixel_values.shape[-2:]) != self.size:
            pixel_values = F.interpolate(pixel_values, self.size, mode="bilinear", antialias=True)
        pixel_values = torch.addcmul(self.offset, pixel_values, self.scale)
        return self.model(pixel_values.to(self.model.dtype)).logits[:, self.order]


def _match_classes(ours: list[str], theirs: list[str], teacher: str) -> list[int]:
    """Return the teacher's class number of each class of the student."""
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
    """Divergence of the student's probabilities from the teacher's, on the same mixed crops.

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
