"""Masked patch prediction, the paper's self-supervised pre-training (arXiv 2010.11929, appendix B.1.2).

The original code was never released. The paper does not specify two details. Here, the same number of patches is
corrupted in every image, and the "random other patch" is from the same image.
"""

from dataclasses import dataclass
from typing import NamedTuple, Unpack

import torch
from torch import nn
from torch.nn import functional as F
from transformers import initialization as init
from transformers.utils.generic import ModelOutput, TransformersKwargs, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .configuration_hf_vit import HfViTConfig, HfViTHybridConfig
from .modeling_hf_vit_variants import HfViTModel, HfViTVariant
from .pretrained import HEAD_KEYS, HfViTHead
from .sizes import as_pair

LEVELS = 8  # 3 bits per channel
_CELLS = 4  # the downsized patch has 4 x 4 cells


class Corruption(NamedTuple):
    """Corruption of each patch of a batch: tensors (batch, patches)."""

    selected: torch.Tensor  # bool: patches to predict
    masked: torch.Tensor  # bool: selected patches that are replaced by the mask token
    source: torch.Tensor  # index of the patch whose embedding is used: the patch's own index, or that of another patch


def sample_corruption(
    batch: int,
    patches: int,
    share: float = 0.5,
    mask_share: float = 0.8,
    random_share: float = 0.1,
    device: torch.device | str = "cpu",
    generator: torch.Generator | None = None,
) -> Corruption:
    """Select random patches to predict, and choose how to corrupt each.

    By default, half of the patches are selected. Of these, 80% are replaced by the mask token, 10% by another random
    patch, and 10% are not changed.

    Args:
        batch, patches: number of images, and of patches per image.
        share: fraction of the patches to select.
        mask_share, random_share: fractions of the selected patches to replace with the mask token, and with another
            patch.
        device, generator: as in `torch.rand`.

    Raises:
        ValueError: `share` selects no patch.
    """
    count = round(patches * share)
    if count < 1:
        raise ValueError(f"corruption {share} of {patches} patches rounds to zero patches; use a larger fraction")
    order = torch.rand(batch, patches, device=device, generator=generator).argsort(dim=1)
    selected = order < count
    kind = torch.rand(batch, patches, device=device, generator=generator)
    masked = selected & (kind < mask_share)
    replaced = selected & (kind >= mask_share) & (kind < mask_share + random_share)
    own = torch.arange(patches, device=device).expand(batch, -1)
    step = torch.randint(1, max(patches, 2), (batch, patches), device=device, generator=generator)
    return Corruption(selected, masked, torch.where(replaced, (own + step) % patches, own))


@dataclass
class MaskedPatchPredictionOutput(ModelOutput):
    """Output of `HfViTForMaskedPatchPrediction`.

    Args:
        loss: scalar, mean of `loss_per_image`.
        loss_per_image: (batch,), mean over the selected patches of each image.
        accuracy_per_image: (batch,), fraction of correct predictions for selected patches; 0 for the target "pixels".
        logits: (batch, patches, outputs)
        targets: (batch, patches), (batch, patches, 16) or (batch, patches, values), see `patch_targets`.
        selected: (batch, patches), bool, True for patches that count in the loss.
        hidden_states, attentions: as in `HfViTModel.forward`, if requested.
    """

    loss: torch.Tensor | None = None
    loss_per_image: torch.Tensor | None = None
    accuracy_per_image: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    targets: torch.Tensor | None = None
    selected: torch.Tensor | None = None
    hidden_states: tuple[torch.Tensor, ...] | None = None
    attentions: tuple[torch.Tensor, ...] | None = None


class HfViTForMaskedPatchPrediction(HfViTVariant):
    """Vision Transformer with a mask token and a linear layer that predicts corrupted patches."""

    # Training can start from the encoder of a classifier.
    _keys_to_ignore_on_load_unexpected = [HEAD_KEYS, r"^(vit\.)?(pooler|projection)\."]  # noqa: RUF012
    _new_when_missing = ("predictor.", "mask_token")
    _reinit_message = (
        "The predictor of masked patches or the mask token of {name} is missing or has a different shape, and was "
        "reinitialized (the predictor to zeros, the mask token randomly). Train the model before use."
    )

    def __init__(self, config: HfViTConfig):
        super().__init__(config.without_projection())
        self.vit = HfViTModel(self.config, add_pooling_layer=False)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, config.hidden_size))
        self.predictor = HfViTHead(config.hidden_size, _num_outputs(config))
        self.post_init()

    def initialize(self) -> None:
        """Initialize the mask token from a normal distribution."""
        init.normal_(self.mask_token, std=self.config.initializer_range)

    def set_num_channels(self, num_channels: int) -> None:
        """Raise ValueError: the outputs depend on the number of channels."""
        raise ValueError(f"cannot set num_channels {num_channels}: the outputs depend on it; build a new model")

    @merge_with_config_defaults
    @capture_outputs(tie_last_hidden_states=False)
    def forward(
        self,
        pixel_values: torch.Tensor,
        bool_masked_pos: torch.Tensor | None = None,
        interpolate_pos_encoding: bool | None = None,
        attention_mask: torch.Tensor | None = None,
        *,
        corruption: Corruption | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> MaskedPatchPredictionOutput:
        """Corrupt the patch embeddings, encode them, and predict the selected patches.

        Args:
            pixel_values: (batch, num_channels, height, width) in [-1, 1].
            bool_masked_pos: (batch, patches), True for patches to mask and predict.
            interpolate_pos_encoding, attention_mask: as in `HfViTModel.forward`.
            corruption: the corruption of each patch, without `bool_masked_pos`. If both are None, it is sampled by
                `sample_corruption`.
        """
        self.check_forward_arguments(kwargs)
        grid = self.grid_of(pixel_values)
        self.vit.warn_about_image_size(pixel_values, interpolate_pos_encoding)
        embeddings = self.vit.embeddings
        patches = embeddings.embed_patches(pixel_values)
        if bool_masked_pos is not None and corruption is not None:
            raise ValueError("cannot use both bool_masked_pos and corruption; pass one of them")
        if bool_masked_pos is not None:
            masked = bool_masked_pos.bool()
            own = torch.arange(masked.shape[1], device=masked.device).expand_as(masked)
            corruption = Corruption(masked, masked, own)
        elif corruption is None:
            corruption = sample_corruption(*patches.shape[:2], device=pixel_values.device)
        patches = self.corrupt(patches, corruption)
        tokens = embeddings.add_positions(patches, embeddings.position_embeddings_for(grid, patches))
        hidden_states, _ = self.vit.encode(tokens, attention_mask, **self.vit.layer_arguments(grid), **kwargs)
        hidden_states = self.vit.layernorm(hidden_states)[:, self.config.num_prefix_tokens :]
        logits = self.predictor(hidden_states)
        targets = patch_targets(pixel_values, grid, self.config.patch_target)
        losses, correct = patch_losses(logits, targets, self.config.patch_target, self.config.num_channels)
        selected = corruption.selected
        count = selected.sum(dim=1).clamp(min=1)
        per_image = (losses * selected).sum(dim=1) / count
        accuracy = (correct * selected).sum(dim=1) / count
        return MaskedPatchPredictionOutput(per_image.mean(), per_image, accuracy, logits, targets, selected)

    def corrupt(self, patches: torch.Tensor, corruption: Corruption) -> torch.Tensor:
        """Corrupt patch embeddings: (batch, patches, hidden_size) -> the same shape"""
        source = corruption.source.unsqueeze(-1).expand_as(patches)
        return torch.where(
            corruption.masked.unsqueeze(-1), self.mask_token.to(patches.dtype), patches.gather(1, source)
        )


class HfViTHybridForMaskedPatchPrediction(HfViTForMaskedPatchPrediction):
    """Hybrid (ResNet stem and Vision Transformer) for masked patches; see `HfViTForMaskedPatchPrediction`."""

    config: HfViTHybridConfig


def _num_outputs(config: HfViTConfig) -> int:
    """Return the number of outputs of the predictor for each patch."""
    colors = LEVELS**config.num_channels
    if config.patch_target == "pixels":
        height, width = as_pair(config.image_size)
        rows, columns = config.grid_size
        return config.num_channels * (height // rows) * (width // columns)
    return colors if config.patch_target == "mean_color" else _CELLS * _CELLS * colors


def patch_targets(pixel_values: torch.Tensor, grid: tuple[int, int], kind: str) -> torch.Tensor:
    """Compute the prediction target of each patch.

    Args:
        pixel_values: (batch, channels, height, width) in [-1, 1].
        grid: (rows, columns) of patches.
        kind: a `patch_target` of `HfViTConfig`.

    Returns:
        "mean_color": (batch, patches), class index of the patch's mean color with 3 bits per channel.
        "downsized": (batch, patches, 16), the same for each cell of the patch, downsized to 4 x 4.
        "pixels": (batch, patches, channels * patch height * patch width), the pixel values.
    """
    pixel_values = pixel_values.float()
    if kind == "pixels":
        patches = pixel_values.unflatten(3, (grid[1], -1)).unflatten(2, (grid[0], -1))
        return patches.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
    cells = 1 if kind == "mean_color" else _CELLS
    means = F.adaptive_avg_pool2d(pixel_values, (grid[0] * cells, grid[1] * cells))
    classes = color_classes(means)  # (batch, rows * cells, columns * cells)
    classes = classes.unflatten(2, (grid[1], cells)).unflatten(1, (grid[0], cells))
    return classes.permute(0, 1, 3, 2, 4).flatten(3).flatten(1, 2).squeeze(-1)


def color_classes(colors: torch.Tensor) -> torch.Tensor:
    """Convert colors to class indices, with 3 bits per channel; the first channel has the most significant bits.

    Args:
        colors: (batch, channels, height, width) in [-1, 1]

    Returns:
        (batch, height, width), int64
    """
    levels = ((colors + 1) / 2 * LEVELS).floor().clamp(0, LEVELS - 1).long()
    weights = LEVELS ** torch.arange(colors.shape[1] - 1, -1, -1, device=colors.device)
    return (levels * weights.view(-1, 1, 1)).sum(dim=1)


def patch_losses(
    logits: torch.Tensor, targets: torch.Tensor, kind: str, num_channels: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss and the fraction of correct predictions for each patch, (batch, patches) each.

    Args:
        logits: (batch, patches, outputs)
        targets, kind: see `patch_targets`.
    """
    logits = logits.float()
    if kind == "pixels":
        return (logits - targets).square().mean(dim=-1), torch.zeros_like(logits[..., 0])
    if kind == "mean_color":
        targets = targets.unsqueeze(-1)
    logits = logits.unflatten(-1, (-1, LEVELS**num_channels))  # (batch, patches, cells, colors)
    losses = F.cross_entropy(logits.flatten(0, 2), targets.flatten(), reduction="none").view(targets.shape)
    return losses.mean(dim=-1), (logits.argmax(dim=-1) == targets).float().mean(dim=-1)
