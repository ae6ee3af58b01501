"""A classifier as an ONNX program for images of any height and width: the resize is inside.

| name | shape | content |
| --- | --- | --- |
| pixel_values | (batch, channels, height, width), uint8 or float32 | levels from 0 to 255 |
| logits | (batch, classes) | as from the image processor and the model |
| attention | (batch, rows, columns) | attention rollout over the patches; not for a BiT |

`image_resizing` computes its weights in NumPy, for a size that is known. Here the size is a tensor and the weights are
part of the program. Products and sums have the same order, so that the levels are the same ones.
"""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.export import Dim

from ..conversion.reading_back import TOLERANCES, check_outputs, model_output
from ..conversion.tables import ConversionError
from ..models.image_processing_hf_vit import HfViTImageProcessor, Normalize, flip_channels
from ..models.image_resizing import PILLOW_BITS, pillow_resizes_rows_first
from ..models.pretrained import HfVisionPreTrainedModel
from ..models.relevance import token_weights
from ..models.resize_weights import AREA, KERNELS, crop_rounding
from .programs import run_onnx, trace_onnx

Length = Any  # of an axis: an int, or a torch.SymInt of torch.export
Taps = tuple[torch.Tensor, torch.Tensor]  # indices of values and their weights, (taps, outputs) each
ANY_SIZE = "any"


def make_any_size_onnx(
    model: HfVisionPreTrainedModel, processor: HfViTImageProcessor | None, dtype: torch.dtype = torch.uint8
) -> Any:
    """Make the `torch.onnx.ONNXProgram` that this module describes; its `save` writes a file.

    Args:
        model: a classifier, on the CPU.
        processor: its image processor.
        dtype: of the levels: uint8, or float32, which `transformers.js` needs.

    Raises:
        ConversionError: the model or the preprocessing is not supported.
    """
    processor = check_classifier(model, processor)
    problem, resample = unsupported_sizes(processor.settings()), processor.settings()["resample"]
    if resample not in (*KERNELS, AREA):
        problem = f"resample={resample} (expected {sorted(KERNELS)} or {AREA!r})"
    if problem:
        raise ConversionError(f"cannot export a program for images of any size: {problem}")
    module = AnySizeClassifier(model, processor).eval()
    example = torch.zeros(2, model.config.num_channels, 37, 53, dtype=dtype)
    return to_onnx(module, example, ["logits", "attention"][: 1 + module.has_attention])


def check_any_size_onnx(
    file: Path, model: Any, processor: Any, dtype: Any = np.uint8, tolerance: float | None = None
) -> None:
    """Compute one image with ONNX Runtime, and compare the logits with the model's.

    Args:
        file: a program of `make_any_size_onnx`.
        model, processor: what it was made of.
        dtype: of the levels.
        tolerance: as in `check_outputs`; by default that of the model's dtype.

    Raises:
        ConversionError: they differ.
    """
    shape = (37, 53, model.config.num_channels)
    levels = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    found = run_onnx(file, levels.transpose(2, 0, 1)[None].astype(dtype))
    expected = model_output(model, processor(levels, return_tensors="pt").pixel_values)
    check_outputs("ONNX Runtime", found, expected, TOLERANCES[model.dtype] if tolerance is None else tolerance)


def to_onnx(module: nn.Module, example: torch.Tensor, output_names: list[str]) -> Any:
    """Export a module for any batch size, height and width; none is 1 in `example`, which would make it a constant."""
    axes = {0: Dim.DYNAMIC, 2: Dim.DYNAMIC, 3: Dim.DYNAMIC}
    with torch.no_grad():
        return trace_onnx(module, example, {"pixel_values": axes}, output_names)


def check_classifier(model: Any, processor: Any) -> HfViTImageProcessor:
    """Return the image processor; raise ConversionError if it is another package's, or the model does not classify."""
    if not is_classifier(model) or getattr(model.config, "pooling", None) == "none":
        raise ConversionError(f"{type(model).__name__} does not classify images (expected a classifier that pools)")
    return check_processor(processor)


def is_classifier(model: Any) -> bool:
    """Return whether a model computes logits."""
    return hasattr(model, "classifier") or getattr(model, "is_classifier", False)  # the latter of an Int8Model


def check_processor(processor: Any) -> HfViTImageProcessor:
    """Return the image processor; raise ConversionError if it is another package's."""
    if not isinstance(processor, HfViTImageProcessor):
        raise ConversionError(f"the image processor is {type(processor).__name__} (expected HfViTImageProcessor)")
    return processor


def unsupported_sizes(settings: dict[str, Any]) -> str | None:
    """Return a setting of an image processor with which its images have not one known size; None if they have."""
    size, crop = settings["size"], settings["crop_size"] if settings["do_center_crop"] else {}
    short = size.get("shortest_edge")
    if settings["preset"] == "native":
        return 'preset="native" makes patches, not an image'
    if not settings["do_resize"]:
        return "do_resize=False gives images of different sizes"
    if any(crop[axis] > size.get(axis, short) for axis in crop):
        return f"crop_size {crop} is larger than the resized image, {size}, so the crop is padded"
    return f"size={size} without a crop gives images of different sizes" if not crop and short is not None else None


class TensorImageProcessor(nn.Module):
    """An image processor as a module: levels (batch, channels, any height, any width) -> pixel values."""

    def __init__(self, processor: HfViTImageProcessor):
        super().__init__()
        self.settings = processor.settings()
        self.scale, self.offset = map(nn.Buffer, Normalize.of(processor).scale_and_offset())

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        levels = resize(pixel_values, self.settings)
        if self.settings["do_flip_channel_order"]:
            levels = flip_channels(levels)
        return levels * self.scale + self.offset


class AnySizeClassifier(nn.Module):
    """An image processor and a classifier as one module: levels -> logits, attention rollout."""

    def __init__(self, model: Any, processor: HfViTImageProcessor):
        super().__init__()
        self.processor, self.model = TensorImageProcessor(processor), copy.deepcopy(model).float()
        if getattr(model.config, "is_flexible", False):
            self.model.make_fixed()
        self.has_attention = hasattr(model, "vit")
        if self.has_attention:
            self.model.set_attn_implementation("eager")

    def forward(self, pixel_values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        pixel_values = self.processor(pixel_values)
        if not self.has_attention:
            return (self.model(pixel_values).logits,)
        outputs = self.model.vit(pixel_values, output_attentions=True)
        shares = attention_rollout(self.model.vit, outputs)
        grid = self.model.config.grid_of(*pixel_values.shape[-2:])
        return self.model.classifier(outputs.pooler_output), shares.unflatten(1, grid)


def attention_rollout(encoder: Any, outputs: Any) -> torch.Tensor:
    """Return the share of each patch in the head's input, (batch, patches); see `analysis.attention_rollout`."""
    tokens = outputs.last_hidden_state.shape[1]
    shares = token_weights(encoder.pooler, outputs.last_hidden_state)[:, None]  # (batch, 1, tokens)
    for attentions in reversed(outputs.attentions):
        mixing = attentions.mean(dim=1) + torch.eye(tokens)  # the identity stands for the residual connection
        shares = shares @ (mixing / mixing.sum(dim=-1, keepdim=True))
    patches = shares[:, 0, encoder.config.num_prefix_tokens :]
    return patches / patches.sum(dim=1, keepdim=True)


# The resizes. Each computes only the part inside the crop; `_Axis` says which.


class _Axis:
    """Height or width of the resize.

    Attributes:
        old: pixels of the image.
        new: pixels of the whole resized image, a number or an int64 tensor.
        least: a number that is at most `new`, for the number of taps.
        start, length: the part inside the crop.
    """

    def __init__(self, name: str, old: Length, short: Length, settings: dict[str, Any]):
        side = settings["size"].get("shortest_edge")
        rounded = settings["resize_output"] == "rounded"  # torchvision's rules, else big_vision's
        self.old = old
        self.new = self.least = settings["size"][name] if side is None else side * old // short
        if side is not None and not rounded:
            ratio = side / _number(short, torch.float32)
            self.new = (_number(old, torch.float32) * ratio).round().long()
        self.start, self.length = 0, settings["size"].get(name)
        if settings["do_center_crop"]:
            self.length = settings["crop_size"][name]
            removed = self.new - self.length
            rounding = crop_rounding(settings["preset"], settings["resize_output"])
            odd_half = removed // 2 % 2 if rounding == "half_even" else 0
            self.start = removed // 2 + removed % 2 * odd_half

    def positions(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the numbers of the pixels inside the crop, (length,)."""
        return (torch.arange(self.length) + self.start).to(dtype)

    def numbers(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the old and the new length as tensors."""
        return _number(self.old, dtype), _number(self.new, dtype)


def _number(length: Length, dtype: torch.dtype) -> torch.Tensor:
    """Return a length as a tensor; `torch.tensor(length)` would fix it in the program."""
    return length.to(dtype) if isinstance(length, torch.Tensor) else torch.full((), length, dtype=dtype)


def resize(levels: torch.Tensor, settings: dict[str, Any]) -> torch.Tensor:
    """Resize and crop as the image processor: (batch, channels, any height, any width) -> the model's size."""
    old_height, old_width = levels.shape[-2:]
    short = torch.sym_min(old_height, old_width)
    down, across = (_Axis(name, old, short, settings) for name, old in (("height", old_height), ("width", old_width)))
    if settings["resize_output"] == "rounded":
        return _resize_like_pillow(levels, down, across, settings["resample"])
    if settings["resample"] == AREA:
        rows, columns = _area_taps(down), _area_taps(across)
        (old, new), (old_across, new_across) = down.numbers(torch.float32), across.numbers(torch.float32)
        resized = _sum_rows(_sum_columns(levels, columns), rows) * (1 / ((old / new) * (old_across / new_across)))
    elif settings["antialias"]:
        rows, columns = (_filter_taps(axis, settings["resample"]) for axis in (down, across))
        rows, columns = ((indices, weights.float()) for indices, weights in (rows, columns))
        resized = _sum_rows(_sum_columns(levels, columns), rows)
    else:
        resized = _resize_bilinear(levels, down, across)
    return resized.to(torch.uint8).float() if settings["resize_output"] == "truncated" else resized


def _resize_bilinear(levels: torch.Tensor, down: _Axis, across: _Axis) -> torch.Tensor:
    """TensorFlow's bilinear resize without antialiasing; it blends left with right, then top with bottom."""
    above, below, down_weight = _bilinear_taps(down)
    left, right, across_weight = _bilinear_taps(across)
    rows = levels.index_select(-2, torch.cat([above, below])).float()
    first, second = rows.index_select(-1, left), rows.index_select(-1, right)
    rows = first + (second - first) * across_weight
    first, second = rows.split(down.length, dim=-2)
    return first + (second - first) * down_weight[:, None]


def _resize_like_pillow(levels: torch.Tensor, down: _Axis, across: _Axis, resample: int) -> torch.Tensor:
    """`PIL.Image.resize` of uint8 in its fixed-point arithmetic, in the order of the installed version's passes."""
    rows, columns = (_pillow_taps(axis, resample) for axis in (down, across))

    def rows_first(levels: torch.Tensor) -> torch.Tensor:
        return _to_levels(_sum_columns(_to_levels(_sum_rows(levels, rows)), columns)).contiguous()

    def columns_first(levels: torch.Tensor) -> torch.Tensor:
        return _to_levels(_sum_rows(_to_levels(_sum_columns(levels, columns)), rows))

    if levels.is_floating_point():
        levels = levels.round().to(torch.uint8)
    resized = torch.cond(pillow_resizes_rows_first(down, across), rows_first, columns_first, (levels,))
    return resized.float()


def _to_levels(sums: torch.Tensor) -> torch.Tensor:
    """Round Pillow's fixed-point format to levels, with halves up; float64 holds the sums exactly."""
    return (sums.double() / 2**PILLOW_BITS + 0.5).floor().clamp(0, 255).to(torch.uint8)


# Weights along an axis


def _bilinear_taps(axis: _Axis) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return two neighbors and the weight of the second, (length,) each."""
    old, new = axis.numbers(torch.float32)
    position = (axis.positions(torch.float32) + 0.5) * (old / new) - 0.5
    below = position.floor()
    return below.clamp(min=0).long(), torch.minimum(position.ceil(), old - 1).long(), position - below


def _area_taps(axis: _Axis) -> Taps:
    """Return the covered fraction of each pixel."""
    old, new = axis.numbers(torch.float32)
    scale = old / new
    start, end = ((axis.positions(torch.float32) + shift) * scale for shift in (0, 1))
    left = start.floor() + torch.arange(axis.old // axis.least + 2)[:, None]
    covered = torch.minimum(left + 1, end) - torch.maximum(left, start)
    covered = torch.where((left < start) & (left + 1 > end), scale, covered)
    return torch.minimum(left, old - 1).long(), torch.where(left < end.ceil(), covered, 0.0)


def _filter_taps(axis: _Axis, resample: int) -> Taps:
    """Return the weights of a filter that widens with the ratio of a reduction, in float64 as Pillow."""
    kernel, radius = KERNELS[resample]
    old, new = axis.numbers(torch.float64)
    widening = (old / new).clamp(min=1)
    center = (axis.positions(torch.float64) + 0.5) * (old / new)
    first = (center - radius * widening + 0.5).floor().clamp(min=0)
    last = torch.minimum((center + radius * widening + 0.5).floor(), old)
    taps = 2 * radius * torch.sym_max(axis.old, axis.least) // axis.least + 2
    pixels = first + torch.arange(taps)[:, None]
    weights = torch.where(pixels < last, kernel((pixels - center + 0.5).abs() * (1 / widening)), 0.0)
    return torch.minimum(pixels, old - 1).long(), weights * (1 / weights.sum(dim=0))


def _pillow_taps(axis: _Axis, resample: int) -> Taps:
    """Return the weights of Pillow's filter in its fixed-point format, rounded with halves away from zero."""
    numbers, weights = _filter_taps(axis, resample)
    scaled = weights * 2**PILLOW_BITS
    return numbers, (scaled.sign() * (scaled.abs() + 0.5).floor()).int()


def _sum_columns(levels: torch.Tensor, taps: Taps) -> torch.Tensor:
    return _sum_rows(levels.transpose(-1, -2), taps).transpose(-1, -2)


def _sum_rows(levels: torch.Tensor, taps: Taps) -> torch.Tensor:
    """(batch, channels, old, width) -> (batch, channels, length, width), in the weights' dtype

    A loop over the taps instead of one sum: a sum of floats depends on its order, and memory holds one tap at a time.
    """
    from torch._higher_order_ops.scan import scan

    def add(sums: torch.Tensor, tap: Taps) -> tuple[torch.Tensor, torch.Tensor]:
        indices, weights = tap
        return sums + levels.index_select(-2, indices).to(weights.dtype) * weights[:, None], weights.new_zeros(())

    batch, channels, _, width = levels.shape
    zeros = torch.zeros(batch, channels, taps[0].shape[1], width, dtype=taps[1].dtype)
    return scan(add, zeros, taps)[0]
