"""Quantization of a classifier to int8, calibrated on images; layers with outliers stay in float32.

Linear layers and the patch embedding multiply 8-bit numbers. Weights have a scale for each output channel; inputs have
256 steps between their smallest and largest value on the calibration images (NNCF writes them into an OpenVINO
program). Attention, norms and sums stay in float32.

A layer stays in float32 if its largest input is more than 20 times the root mean square: of 256 steps up to this value,
fewer than 13 would be left for usual inputs. Vision Transformers have a few such layers, the second layers of some
MLPs, with outliers in one or two tokens. Quantizing these layers alone changes one in ten predictions of a ViT-Ti/16.

Weights use half of the range of 8 bits. CPUs without VNNI add two products in 16 bits: with the whole range these
saturate, and 12 of 100 predictions of a ViT-Ti/16 differ from float32 instead of 3.
"""

import contextlib
import hashlib
import importlib.metadata
import io
import logging
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ..catalog import imagenet_numbers
from ..files.fingerprint import fingerprint_weights
from ..files.image_files import images_below
from ..files.manifest import sha256_of
from ..files.output import new_folder, refuse_existing, refuse_inputs, write_json
from ..files.readme import write_readme
from ..files.runs import copy_reports
from ..files.versions import require
from ..loading import check_name, find_model, load
from ..models.modeling_hf_vit_variants import HfViTForImageClassification
from ..models.pretrained import CONVERSION_RECORD, QUANTIZATION_RECORD
from ..models.sizes import as_pair
from .int8 import FORMAT, PROGRAM_FILES, Int8Model
from .program_model import read_openvino
from .programs import make_openvino

MIN_IMAGES, MAX_IMAGES = 16, 400
_HELD_OUT = 4  # every fourth image is held out: it measures and does not calibrate
_OUTLIER = 20  # times the root mean square of a layer's inputs
_BATCH_SIZE = 8
_ROUNDS = 15
_MOVES = ("Reshape", "Transpose", "Squeeze", "Unsqueeze", "Gather", "Slice", "StridedSlice")  # do not change values


def quantize(
    folder: str | os.PathLike,
    output: str | os.PathLike,
    images: Sequence[str | os.PathLike],
    *,
    min_agreement: float = 0.95,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Quantize a classifier to int8, and write a folder with the int8 program, the float32 weights and the processor.

    `hf_vit.load(output)` loads a model that computes in int8.

    Args:
        folder: folder of a ViT classifier and its image processor, or a name on the Hub.
        output: path of the folder, which is written completely or not at all.
        images: image files, or folders of them, typical of the model's use. At most 400 are used, evenly spread; every
            fourth is held out to measure.
        min_agreement: share of held-out images whose prediction must agree with float32; below it nothing is written.
        overwrite: replace an existing folder.

    Returns:
        The content of its quantization.json.

    Raises:
        ValueError: there is no classifier or processor, an image cannot be read, there are fewer than 16 images, or the
            predictions agree too rarely.
        FileExistsError: `output` exists, and `overwrite` is False.
        ImportError: the extra `quantization` is not installed.
    """
    check_name(folder)
    refuse_inputs(output, folder, *images)
    refuse_existing(output, overwrite)
    require("nncf", "openvino")
    files = _choose_images(images)
    model, processor = load(folder, backend="eager")  # the folder may be quantized already
    if model.config.problem_type == "regression":
        raise ValueError(f"cannot quantize {folder}: it predicts numbers (expected a classifier)")
    if not isinstance(model, HfViTForImageClassification) or model.config.pooling == "none":
        raise ValueError(f"cannot quantize {folder}: it holds a {type(model).__name__} (expected a ViT classifier)")
    model = model.float()
    batches = (files[start : start + _BATCH_SIZE] for start in range(0, len(files), _BATCH_SIZE))
    read = (processor([str(file) for file in batch], return_tensors="pt")["pixel_values"] for batch in batches)
    pixel_values = torch.cat(list(read)).float()  # (images, channels, height, width)
    held_out = torch.arange(len(files)) % _HELD_OUT == _HELD_OUT - 1
    expected, outliers = _observe(model, pixel_values)
    with new_folder(output, overwrite) as draft:
        model.save_pretrained(draft)
        processor.save_pretrained(draft)
        write_readme(draft, model.config.model_type, type(model).__name__)
        copy_reports(find_model(folder).find_report, draft, CONVERSION_RECORD)
        ranges = _write_program(model, pixel_values[~held_out], outliers, draft)
        record = {
            "format": FORMAT,
            "method": "NNCF: weights per channel in 7 bits, inputs per tensor in 8 bits, between minimum and maximum",
            "model": fingerprint_weights(model),
            "files": {name: sha256_of(draft / name) for name in PROGRAM_FILES},
            "image_size": list(as_pair(model.config.image_size)),
            "layers": ranges,
            "in_float32": outliers,
            "versions": {name: importlib.metadata.version(name) for name in ("hf_vit", "nncf", "openvino", "torch")},
            "calibration": {
                "images": int((~held_out).sum()),
                "sha256": hashlib.sha256("".join(map(sha256_of, files)).encode()).hexdigest(),
            },
        }
        write_json(draft / QUANTIZATION_RECORD, record)
        int8 = Int8Model(model, draft)
        logits = _logits(int8, pixel_values[held_out])
        expected = expected[held_out]
        agreement = _accuracy(logits, expected.argmax(dim=1))
        difference = (logits - expected).abs().max().item()
        record["held_out"] = {"images": len(logits), "agreement": agreement, "largest_logit_difference": difference}
        if (labels := _labels(files, model.config)) is not None:
            top1 = {"int8": _accuracy(logits, labels[held_out]), "float32": _accuracy(expected, labels[held_out])}
            record["top1"] = {"images": len(logits), **top1}
        if agreement < min_agreement:
            raise ValueError(
                f"cannot quantize {folder}: {agreement:.1%} of {len(logits)} predictions agree with float32 "
                f"(expected at least {min_agreement:.1%}); calibrate with more images, typical of the model's use"
            )
        record["seconds"] = _time({"int8": int8, "float32": model}, pixel_values[:1])
        write_json(draft / QUANTIZATION_RECORD, record)
    return record


def _choose_images(paths: Sequence[str | os.PathLike]) -> list[Path]:
    """Choose at most 400 image files, evenly spread, so that all classes of a sorted folder are included.

    Raises:
        FileNotFoundError: there is no such file or folder.
        ValueError: there are too few images.
    """
    files: list[Path] = []
    for path in map(Path, paths):
        if not path.exists():
            raise FileNotFoundError(f"no such file or folder: {path}")
        files += images_below(path) if path.is_dir() else [path]
    if len(files) < MIN_IMAGES:
        raise ValueError(f"cannot calibrate with {len(files)} images (expected {MIN_IMAGES} or more, better 300)")
    chosen = np.linspace(0, len(files) - 1, min(len(files), MAX_IMAGES)).round().astype(int)
    return [files[index] for index in chosen]


@torch.inference_mode()
def _logits(model: Any, pixel_values: torch.Tensor) -> torch.Tensor:
    return torch.cat([model(batch).logits for batch in pixel_values.split(_BATCH_SIZE)])


def _accuracy(logits: torch.Tensor, labels: torch.Tensor) -> float:
    return (logits.argmax(dim=1) == labels).double().mean().item()


def _observe(model: Any, pixel_values: torch.Tensor) -> tuple[torch.Tensor, list[str]]:
    """Return the float32 logits, and the names of the linear layers whose inputs have outliers."""
    largest, mean_squares = defaultdict(list), defaultdict(list)  # name -> one number for each batch

    def note(name: str, module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        largest[name].append(inputs[0].abs().max().item())
        mean_squares[name].append(inputs[0].square().mean().item())

    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    hooks = [module.register_forward_pre_hook(partial(note, name)) for name, module in layers]
    logits = _logits(model, pixel_values)
    for hook in hooks:
        hook.remove()
    limits = {name: _OUTLIER * statistics.fmean(squares) ** 0.5 for name, squares in mean_squares.items()}
    return logits, [name for name, limit in limits.items() if max(largest[name]) > limit]


def _write_program(model: Any, pixel_values: torch.Tensor, outliers: list[str], folder: Path) -> dict[str, list[float]]:
    """Convert a model for OpenVINO, quantize it and write it.

    Returns:
        The smallest and largest input of every layer in int8, by name.
    """
    os.environ.setdefault("NNCF_CI", "1")  # turns off its telemetry
    logger_class = logging.getLoggerClass()
    import nncf
    import openvino
    from nncf.quantization.advanced_parameters import (
        AdvancedQuantizationParameters,
        AdvancedSmoothQuantParameters,
        OverflowFix,
    )
    from nncf.quantization.range_estimator import RangeEstimatorParametersSet

    logging.setLoggerClass(logger_class)  # nncf replaces it globally
    with tempfile.TemporaryDirectory() as temporary:
        file = Path(temporary, PROGRAM_FILES[0])
        make_openvino(model, as_pair(model.config.image_size), file, ["logits"])
        program = read_openvino(file)
    nodes = _nodes_of(program, model)
    nncf.set_log_level(logging.ERROR)
    with contextlib.redirect_stdout(io.StringIO()):  # its progress bars
        quantized = nncf.quantize(
            program,
            nncf.Dataset([image[None] for image in pixel_values.numpy()]),
            subset_size=len(pixel_values),
            preset=nncf.QuantizationPreset.MIXED,
            model_type=nncf.ModelType.TRANSFORMER,
            ignored_scope=nncf.IgnoredScope(
                names=[node for node, layer in nodes.items() if layer in outliers],
                types=["ScaledDotProductAttention"],
                validate=False,
            ),
            advanced_parameters=AdvancedQuantizationParameters(
                activations_range_estimator_params=RangeEstimatorParametersSet.MINMAX,
                smooth_quant_alphas=AdvancedSmoothQuantParameters(matmul=-1),
                disable_bias_correction=True,
                overflow_fix=OverflowFix.ENABLE,
            ),
        )
    openvino.save_model(quantized, folder / PROGRAM_FILES[0], compress_to_fp16=False)
    return dict(_input_ranges(quantized, nodes))


def _nodes_of(program: Any, model: nn.Module) -> dict[str, str]:
    """Return the names of the layers by the names of their products in a program, found by equal weights."""
    layers: dict[bytes, list[str]] = {}
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, nn.Conv2d)):
            layers.setdefault(_numbers(module.weight.detach().numpy()), []).append(name)
    nodes = {}
    for node in program.get_ordered_ops():  # as in the model, which decides between layers with equal weights
        if node.get_type_name() in ("MatMul", "Convolution"):
            source = node.input_value(1).get_node()
            if source.get_type_name() == "Constant" and (names := layers.get(_numbers(source.data))):
                nodes[node.get_friendly_name()] = names.pop(0)
    return nodes


def _input_ranges(program: Any, nodes: dict[str, str]) -> Iterator[tuple[str, list[float]]]:
    """Yield the name of every quantized layer, and the smallest and largest value of its input."""
    for node in program.get_ordered_ops():
        if (layer := nodes.get(node.get_friendly_name())) is not None:
            source = node.input_value(0).get_node()
            while source.get_type_name() in _MOVES:
                source = source.input_value(0).get_node()
            if source.get_type_name() == "FakeQuantize":
                low, high = (source.input_value(index).get_node().data.item() for index in (1, 2))
                yield layer, [low, high]


def _numbers(weight: np.ndarray) -> bytes:
    return hashlib.sha256(np.ascontiguousarray(weight).tobytes()).digest()


def _labels(files: list[Path], config: Any) -> torch.Tensor | None:
    """Return the class of every image, by the name of its folder; None if these are not the model's classes."""
    theirs = [config.id2label[number] for number in range(config.num_labels)]
    names = [file.parent.name for file in files]
    numbers = {name: number for number, name in enumerate(theirs)}
    if not set(names) <= numbers.keys():
        classes, columns = sorted(set(names)), imagenet_numbers(theirs)
        found = imagenet_numbers(classes)
        if found is None or columns is None or not set(found) <= set(columns):
            return None
        numbers = {name: columns.index(number) for name, number in zip(classes, found, strict=True)}
    return torch.tensor([numbers[name] for name in names])


@torch.inference_mode()
def _time(models: dict[str, Any], image: torch.Tensor) -> dict[str, float]:
    """Return the median seconds of wall clock for one image of each model; the models take turns."""
    times: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(_ROUNDS + 1):
        for name, model in models.items():
            start = time.perf_counter()
            model(image)
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values[1:]) for name, values in times.items()}  # without the first, a warm-up
