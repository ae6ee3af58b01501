"""`hf-vit benchmark`."""

import copy
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Annotated, Any

from ..files.messages import format_error
from .arguments import ImageSize, Model, parse_count
from .image_list import Device, load_on_device

_TIMED = {  # name in the table: backend and dtype of `hf_vit.load`
    "PyTorch, optimized": ("torch", "float32"),
    "PyTorch, optimized, bfloat16": ("torch", "bfloat16"),
    "OpenVINO": ("openvino", "float32"),
    "OpenVINO, bfloat16": ("openvino", "bfloat16"),
    "ONNX Runtime": ("onnxruntime", "float32"),
    "int8": ("int8", "float32"),
}
_MIN_ROUNDS = 5
_PAUSE = 0.05  # seconds; after a call, ONNX Runtime's threads keep the cores busy for about as long
_BatchSizes = Annotated[list[int], "batch sizes to time, in images (default 1 and 8)", {"type": parse_count}]


def benchmark(
    folder: Model,
    *,
    batch_sizes: _BatchSizes = (1, 8),  # pyright: ignore[reportArgumentType]
    image_size: ImageSize = None,
    device: Device = "auto",
    compile_: Annotated[bool, "also time torch.compile, which needs a C++ compiler and about a minute"] = False,
    seconds: Annotated[float, "seconds to spend on each batch size"] = 10,
) -> None:
    """Time a classifier in every installed backend and precision.

    The images are random. The backends run in turns, so that other load on the machine affects all of them. The table
    shows median times. Its last column is the largest difference from the logits of PyTorch in float32. Of an exported
    folder, its own program is timed.
    """
    import torch

    from ..loading import check_classifier
    from ..models.sizes import as_pair
    from ..runtimes.runner import is_deployed

    options: dict[str, Any] = {"image_size": image_size}
    timed = {}
    if not is_deployed(folder):
        options["dtype"] = torch.float32
        timed = _TIMED
    first, _ = load_on_device(folder, device, "eager", **options)
    check_classifier(first, folder)
    about = getattr(first, "runtime", "PyTorch")  # of an exported folder, the name of what computes it
    models = {about: first}
    if compile_:
        if not timed:
            raise ValueError(f"{folder} is an exported program, which torch.compile does not compile")
        models["PyTorch, compiled"] = copy.deepcopy(first)
        models["PyTorch, compiled"].compile()
    not_timed = {}
    for name, (backend, dtype) in timed.items():
        where = device if backend == "torch" else "cpu"
        try:
            models[name], _ = load_on_device(folder, where, backend, **options | {"dtype": getattr(torch, dtype)})
        except (ImportError, ValueError) as error:
            not_timed[name] = format_error(error)

    height, width = as_pair(first.config.image_size)
    milliseconds = {name: [] for name in models}  # per image, for each batch size
    differences = dict.fromkeys(models, 0.0)
    for batch_size in batch_sizes:
        pixel_values = torch.rand(batch_size, first.config.num_channels, height, width) * 2 - 1
        times, logits = _take_turns(models, pixel_values, seconds)
        for name in models:
            difference = (logits[name] - logits[about]).abs().max().item()
            differences[name] = max(differences[name], difference)
            milliseconds[name].append(1000 * statistics.median(times[name]) / batch_size)

    parameters = f"{first.num_parameters():,} parameters, " if timed else ""
    print(f"{folder}: {parameters}{height} x {width} pixels; ", end="")
    print(f"{first.device.type}, threads: {torch.get_num_threads()}\n")
    print(
        f"{'milliseconds per image':30}", *(f"{f'batch {size}':>10}" for size in batch_sizes), "  difference of logits"
    )
    for name, times in milliseconds.items():
        print(f"{name:30}", *(f"{time:10.1f}" for time in times), f"{differences[name]:22.1e}")
    for name, reason in not_timed.items():
        print(f"{name:30} not timed: {reason}")


def _forward(model: Any, pixel_values: Any) -> Callable[[], Any]:
    """Return a function that computes logits (batch, num_labels) as float32 on the CPU, so that it waits for a GPU."""
    import torch

    pixel_values = pixel_values.to(model.device, model.dtype)

    @torch.inference_mode()
    def forward():
        return model(pixel_values=pixel_values).logits.float().cpu()

    return forward


def _take_turns(
    models: Mapping[str, Any], pixel_values: Any, seconds: float
) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """Return durations of forward passes, in seconds, and the logits of each model.

    There are at least `_MIN_ROUNDS` of each, after one that is not timed.
    """
    forwards = {name: _forward(model, pixel_values) for name, model in models.items()}
    logits = {name: forward() for name, forward in forwards.items()}  # and a warm-up
    times = {name: [] for name in models}
    first = times[next(iter(models))]
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(first) < _MIN_ROUNDS:
        for name, forward in forwards.items():
            time.sleep(_PAUSE)
            forward()
            start = time.perf_counter()
            forward()
            times[name].append(time.perf_counter() - start)
    return times, logits
