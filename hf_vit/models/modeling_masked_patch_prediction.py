"""Masked patch prediction, the self-supervised training of the paper (arXiv 2010.11929, appendix B.1.2).

The original code was never released. Two points that the paper leaves open are decided here: exactly the given share of
each image's patches is corrupted, and the "random other patch" is from the same image.
"""

from dataclasses import dataclass
from typing import NamedTuple, Unpack

import torch
from torch import nn
from torch.nn import functional as F
from transformers import initialization as init
from transformers.utils.generic import ModelOutput, TransformersKwargs, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .configuration_hf_vision import as_pair
from .configuration_hf_vit import HfViTConfig, HfViTHybridConfig
from .modeling_hf_vit import HfViTModel, HfViTPreTrainedModel, check_mask
from .pretrained import HEAD_KEYS, HfViTHead

LEVELS = 8  # 3 bits per channel
_CELLS = 4  # the downsized patch has 4 x 4 cells


class Corruption(NamedTuple):
    """Corruption of each patch of a batch: tensors (batch, patches)."""

    selected: torch.Tensor  # bool: to be predicted, changed or not
    masked: torch.Tensor  # bool: replaced by the mask token
    source: torch.Tensor  # index of the patch that is put here: its own, or another's


def sample_corruption(
    batch: int,
    patches: int,
    share: float = 0.5,
    mask_share: float = 0.8,
    random_share: float = 0.1,
    device: torch.device | str = "cpu",
    generator: torch.Generator | None = None,
) -> Corruption:
    """Choose patches to corrupt: of the selected ones, 80 % are masked, 10 % replaced by another patch, 10 % kept.

    Args:
        batch, patches: number of images, and of patches in each.
        share: share of the patches that are selected.
        mask_share, random_share: shares of the selected patches that are masked, and replaced by another patch.
        device, generator: as in `torch.rand`.

    Raises:
        ValueError: `share` of the patches rounds to none.
    """
    count = round(patches * share)
    if count < 1:
        raise ValueError(f"cannot select a share of {share} of {patches} patches: it rounds to none")
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
        loss: mean over the images of the batch.
        loss_per_image: mean over each image's selected patches, (batch,).
        accuracy_per_image: share of correct predictions, (batch,); 0 for the regression of pixels.
        logits: (batch, patches, outputs)
        targets: (batch, patches), (batch, patches, 16) or (batch, patches, values), see `patch_targets`.
        selected: (batch, patches) bool.
        hidden_states, attentions: of every layer, if requested; see `HfViTModel.forward`.
    """

    loss: torch.Tensor | None = None
    loss_per_image: torch.Tensor | None = None
    accuracy_per_image: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    targets: torch.Tensor | None = None
    selected: torch.Tensor | None = None
    hidden_states: tuple[torch.Tensor, ...] | None = None
    attentions: tuple[torch.Tensor, ...] | None = None


class HfViTForMaskedPatchPrediction(HfViTPreTrainedModel):
    """Vision Transformer with a mask token and a linear layer that predicts corrupted patches."""

    # The training may start from an encoder or a classifier, without its head.
    _keys_to_ignore_on_load_unexpected = [HEAD_KEYS, r"^(vit\.)?(pooler|projection)\."]  # noqa: RUF012
    _new_when_missing = ("predictor.", "mask_token")
    _reinit_message = "{name} was not trained to predict masked patches: the predictor is zero, the mask token random."

    def __init__(self, config: HfViTConfig):
        super().__init__(config.without_projection())
        self.vit = HfViTModel(self.config, add_pooling_layer=False)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, config.hidden_size))
        self.predictor = HfViTHead(config.hidden_size, _num_outputs(config))
        self.post_init()

    def initialize(self) -> None:
        """Draw the mask token."""
        init.normal_(self.mask_token, std=self.config.initializer_range)

    def set_num_channels(self, num_channels: int) -> None:
        """Raise ValueError: the model predicts pixels of its own channels."""
        raise ValueError(f"cannot set num_channels {num_channels}: {type(self).__name__} predicts pixels")

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
        """Corrupt patch embeddings, encode them, and compare the predictions with the pixels.

        Args:
            pixel_values: (batch, channels, height, width) in [-1, 1].
            bool_masked_pos: (batch, patches), true for the patches to mask and to predict.
            interpolate_pos_encoding, attention_mask: as in `HfViTModel.forward`.
            corruption: full description of the corruption, in place of `bool_masked_pos`. Without either, it is sampled
                with the paper's shares.

        Raises:
            ValueError: both are given, or `bool_masked_pos` has another shape.
        """
        grid = self.grid_of(pixel_values)
        self.vit.warn_of_image_size(pixel_values, interpolate_pos_encoding)
        embeddings = self.vit.embeddings
        patches = embeddings.embed_patches(pixel_values)
        if bool_masked_pos is not None:
            if corruption is not None:
                raise ValueError("cannot use both bool_masked_pos and corruption; pass one of them")
            corruption = _corruption_of(bool_masked_pos, patches)
        elif corruption is None:
            corruption = sample_corruption(*patches.shape[:2], device=pixel_values.device)
        patches = self.corrupt(patches, corruption)
        tokens = embeddings.add_positions(patches, embeddings.positions_on(grid, patches))
        hidden_states, _ = self.vit.encode(tokens, grid, attention_mask, **kwargs)
        hidden_states = self.vit.layernorm(hidden_states)[:, self.config.num_prefix_tokens :]
        logits = self.predictor(hidden_states)
        targets = patch_targets(pixel_values, grid, self.config.patch_target)
        losses, right = compare(logits, targets, self.config.patch_target, self.config.num_channels)
        selected = corruption.selected
        count = selected.sum(dim=1).clamp(min=1)
        per_image = (losses * selected).sum(dim=1) / count
        accuracy = (right * selected).sum(dim=1) / count
        return MaskedPatchPredictionOutput(per_image.mean(), per_image, accuracy, logits, targets, selected)

    def corrupt(self, patches: torch.Tensor, corruption: Corruption) -> torch.Tensor:
        """Corrupt patch embeddings: (batch, patches, hidden_size) -> the same"""
        source = corruption.source.unsqueeze(-1).expand_as(patches)
        return torch.where(
            corruption.masked.unsqueeze(-1), self.mask_token.to(patches.dtype), patches.gather(1, source)
        )


class HfViTHybridForMaskedPatchPrediction(HfViTForMaskedPatchPrediction):
    """Hybrid (ResNet stem and Vision Transformer) for masked patches; see `HfViTForMaskedPatchPrediction`."""

    config: HfViTHybridConfig


def _corruption_of(bool_masked_pos: torch.Tensor, patches: torch.Tensor) -> Corruption:
    """Build the corruption that masks and predicts exactly the patches of a mask.

    Args:
        bool_masked_pos: (batch, patches)
        patches: (batch, patches, hidden_size)
    """
    check_mask(bool_masked_pos, patches)
    masked = bool_masked_pos.bool()
    return Corruption(masked, masked, torch.arange(masked.shape[1], device=masked.device).expand_as(masked))


def _num_outputs(config: HfViTConfig) -> int:
    """Count the numbers predicted for each patch."""
    colors = LEVELS**config.num_channels
    if config.patch_target == "pixels":
        (height, width), (rows, columns) = as_pair(config.image_size), config.grid_size
        return config.num_channels * (height // rows) * (width // columns)
    return colors if config.patch_target == "mean_color" else _CELLS * _CELLS * colors


def patch_targets(pixel_values: torch.Tensor, grid: tuple[int, int], kind: str) -> torch.Tensor:
    """Compute the prediction target of each patch.

    Args:
        pixel_values: (batch, channels, height, width) in [-1, 1].
        grid: (rows, columns) of patches.
        kind: a `patch_target` of `HfViTConfig`.

    Returns:
        "mean_color": class number of the patch's mean color at 3 bits per channel, (batch, patches).
        "downsized": the same for each cell of the patch shrunk to 4 x 4, (batch, patches, 16).
        "pixels": its pixel values, (batch, patches, channels * height * width).
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
    """(batch, channels, height, width) in [-1, 1] -> (batch, height, width) class numbers

    The first channel has the most significant 3 bits.
    """
    levels = ((colors + 1) / 2 * LEVELS).floor().clamp(0, LEVELS - 1).long()
    weights = LEVELS ** torch.arange(colors.shape[1] - 1, -1, -1, device=colors.device)
    return (levels * weights.view(-1, 1, 1)).sum(dim=1)


def compare(
    logits: torch.Tensor, targets: torch.Tensor, kind: str, num_channels: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss and the share of correct predictions of each patch: (batch, patches) both."""
    logits = logits.float()
    if kind == "pixels":
        return (logits - targets).square().mean(dim=-1), torch.zeros_like(logits[..., 0])
    if kind == "mean_color":
        targets = targets.unsqueeze(-1)
    logits = logits.unflatten(-1, (-1, LEVELS**num_channels))  # (batch, patches, cells, colors)
    losses = F.cross_entropy(logits.flatten(0, 2), targets.flatten(), reduction="none").view(targets.shape)
    return losses.mean(dim=-1), (logits.argmax(dim=-1) == targets).float().mean(dim=-1)
