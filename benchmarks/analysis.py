"""Time and additional memory of the attention distances of a ViT-B/16 over 128 images of 224 pixels.

python benchmarks/analysis.py [--images 128] [--image-size 224]
"""

import argparse
import os
import resource
import time
from pathlib import Path

import torch

from hf_vit import HfViTConfig, HfViTForImageClassification, analysis


def memory() -> float:
    """Return the resident memory of this process in GB, on Linux."""
    return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e9


def _most_memory() -> float:
    """Return the peak resident memory in GB; Linux reports it in KiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=128)
    parser.add_argument("--image-size", type=int, default=224)
    arguments = parser.parse_args()
    model = HfViTForImageClassification(HfViTConfig.from_variant("B/16", image_size=arguments.image_size)).eval()
    pixel_values = torch.rand(arguments.images, 3, arguments.image_size, arguments.image_size)
    before, start = memory(), time.perf_counter()
    analysis.attention_distance(model, pixel_values, progress=True)
    seconds = time.perf_counter() - start
    print(
        f"{arguments.images} images of {arguments.image_size} pixels, {torch.get_num_threads()} threads: at most "
        f"{_most_memory() - before:.2f} GB above the {before:.2f} GB with model and images, {seconds:.0f} s"
    )


if __name__ == "__main__":
    main()
