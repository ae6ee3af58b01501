"""Speed of a run: images a second, share of the device's peak, wait for data, and memory."""

import re
import sys
import time
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForImageClassification
from transformers.initialization import no_init_weights

from ..models.configuration_hf_vit import as_pair
from .run import Run

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

    def __init__(self, run: Run):
        self.run, self.device = run, run.accelerator.device
        self.images_at_peak = _images_at_peak(run)
        self.begin()

    def begin(self) -> None:
        """Start a new measurement."""
        self.step, self.since, self.waited = self.run.step, time.perf_counter(), self.run.waited

    def close(self) -> dict[str, float]:
        """Return the speed since `begin`: images a second, wait for data as a share of the time, memory in GiB."""
        seconds = time.perf_counter() - self.since
        images = (self.run.step - self.step) * self.run.shares.batch_size / seconds
        measured = {"images_per_second": images, "data_wait": (self.run.waited - self.waited) / seconds}
        if self.images_at_peak:
            measured["share_of_peak"] = images / self.images_at_peak
        return measured | memory_in_use(self.device)


def _images_at_peak(run: Run) -> float | None:
    """Images a second at the peak of the GPUs; None if the peak or the number of products is unknown."""
    accelerator, settings = run.accelerator, run.settings
    varies = settings.preset == "native" or settings.patch_sizes  # the number of patches
    is_partial = not all(parameter.requires_grad for parameter in run.parameters.values())  # the backward pass
    if varies or is_partial or accelerator.device.type != "cuda" or accelerator.mixed_precision not in ("bf16", "fp16"):
        return None
    peak = peak_of(torch.cuda.get_device_name(accelerator.device))
    if peak is None:
        return None
    config: Any = accelerator.unwrap_model(run.model).config
    return peak * accelerator.num_processes / (_FORWARDS_PER_STEP * count_flops(config))


def memory_in_use(device: torch.device) -> dict[str, float]:
    """Return the peak memory so far in GiB: of the GPU if there is one, else of this process."""
    if device.type == "cuda":
        return {"memory_gib": torch.cuda.max_memory_allocated(device) / 2**30}
    if resource is None:
        return {}
    unit = 1 if sys.platform == "darwin" else 2**10  # of ru_maxrss
    return {"memory_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30}
