"""Speed of a run: images a second, share of the device's peak, wait for data, and memory; a trace of some steps."""

import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForImageClassification
from transformers.initialization import no_init_weights

from ..files.output import new_file
from ..models.configuration_hf_vit import as_pair

if TYPE_CHECKING:
    from .trainer import Trainer

try:
    import resource
except ImportError:  # Windows
    resource = None

_FORWARDS_PER_STEP = 3  # a forward, and a backward of twice its cost
# Peak in 1e12 dense bfloat16 operations a second (NVIDIA's data sheets); the first key in torch's device name counts
_PEAKS = {
    **{"B200": 2250, "H200": 989, "GH200": 989, "H100 PCIe": 756, "H100 NVL": 835, "H100": 989, "A100": 312},
    **{"L40S": 362, "L40": 181, "L4": 121, "A40": 150, "A10": 125, "RTX A6000": 155, "RTX 4090": 165, "RTX 3090": 71},
}


def peak_of(device: str) -> float | None:
    """Return a GPU's peak in dense bfloat16 operations a second, by its name; None if unknown."""
    found = [peak for name, peak in _PEAKS.items() if re.search(rf"\b{name}\b", device)]
    return found[0] * 1e12 if found else None


def count_flops(config: Any) -> int:
    """Count the floating-point operations of one image's forward, 2 per multiply-add, without computing it."""
    config = type(config).from_dict(config.to_dict(), attn_implementation="eager")  # the counter sees all its products
    with FakeTensorMode(), no_init_weights(), FlopCounterMode(display=False) as counter:
        model = AutoModelForImageClassification.from_config(config)
        model(torch.empty(1, config.num_channels, *as_pair(config.image_size)))
    return counter.get_total_flops()


class Speed:
    """Speed between two reports, measured on the main process."""

    def __init__(self, trainer: "Trainer"):
        self.trainer, self.device = trainer, trainer.accelerator.device
        self.images_at_peak = _images_at_peak(trainer)
        self.begin()

    def begin(self) -> None:
        """Start a new measurement."""
        self.step, self.since, self.waited = self.trainer.state.step, time.perf_counter(), self.trainer.progress.waited

    def close(self) -> dict[str, float]:
        """Return the speed since `begin`: images a second, wait for data as a share of the time, memory in GiB."""
        seconds = time.perf_counter() - self.since
        images = (self.trainer.state.step - self.step) * self.trainer.layout.batch_size / seconds
        measured = {"images_per_second": images, "data_wait": (self.trainer.progress.waited - self.waited) / seconds}
        if self.images_at_peak:
            measured["share_of_peak"] = images / self.images_at_peak
        return measured | memory_in_use(self.device)


def _images_at_peak(trainer: "Trainer") -> float | None:
    """Images a second at the peak of the GPUs; None if the peak or the number of products is unknown."""
    accelerator, settings = trainer.accelerator, trainer.settings
    varies = settings.preset == "native" or settings.patch_sizes  # the number of patches
    is_partial = not all(parameter.requires_grad for parameter in trainer.parameters.values())  # the backward pass
    if varies or is_partial or accelerator.device.type != "cuda" or accelerator.mixed_precision not in ("bf16", "fp16"):
        return None
    peak = peak_of(torch.cuda.get_device_name(accelerator.device))
    if peak is None:
        return None
    return peak * accelerator.num_processes / (_FORWARDS_PER_STEP * count_flops(trainer.config))


def memory_in_use(device: torch.device) -> dict[str, float]:
    """Return the peak memory so far in GiB: of the GPU if there is one, else of this process."""
    if device.type == "cuda":
        return {"memory_gib": torch.cuda.max_memory_allocated(device) / 2**30}
    if resource is None:
        return {}
    unit = 1 if sys.platform == "darwin" else 2**10  # of ru_maxrss
    return {"memory_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30}


_WARM_UP = 5  # largest number of steps before the trace: they compile, allocate and fill the loader


class Profiler:
    """Trace of optimiser steps on the main process.

    Args:
        steps: number of steps, at most `steps_left`; None: no trace.
        steps_left: remaining steps of the run.
        folder: folder of trace.json.
        say: called with a message about the file.
    """

    def __init__(self, steps: int | None, steps_left: int, folder: Path, say: Callable[[str], None]):
        self.profile = None
        if steps is None or steps_left < 1:
            return
        self.folder, self.say = folder, say
        steps = min(steps, steps_left)
        warm_up = min(_WARM_UP, steps_left - steps)
        self.profile = torch.profiler.profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])],
            schedule=torch.profiler.schedule(wait=0, warmup=warm_up, active=steps, repeat=1),
            on_trace_ready=self._write,
            record_shapes=True,
        )
        self.profile.start()

    def step(self) -> None:
        """Record the end of an optimiser step."""
        if self.profile is not None:
            self.profile.step()

    def stop(self) -> None:
        """Stop the trace."""
        if self.profile is not None:
            self.profile.stop()
            self.profile = None

    def _write(self, profile: torch.profiler.profile) -> None:
        file = self.folder / "trace.json"
        self.folder.mkdir(parents=True, exist_ok=True)
        with new_file(file, overwrite=True) as draft:
            profile.export_chrome_trace(str(draft))
        self.say(f"The trace is {file}: open it in https://ui.perfetto.dev or chrome://tracing.")
