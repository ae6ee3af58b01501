"""Memory and time of the attention distance of a ViT-B/16 over 128 images of 224 pixels, above the model's own memory.

python benchmarks/analysis.py [--images 128] [--image-size 224]
"""

import argparse
import resource
import time

import torch

from hf_vit import HfViTConfig, HfViTForImageClassification, analysis


def peak() -> float:
    """The most memory this process has had, in GB; Linux counts it in KiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=128)
    parser.add_argument("--image-size", type=int, default=224)
    arguments = parser.parse_args()
    model = HfViTForImageClassification(HfViTConfig.from_variant("B/16", image_size=arguments.image_size)).eval()
    loader = (torch.rand(8, 3, arguments.image_size, arguments.image_size) for _ in range(arguments.images // 8))
    before, start = peak(), time.perf_counter()
    distances = analysis.attention_distance(model, loader, progress=True)
    seconds = time.perf_counter() - start
    print(f"{arguments.images} images of {arguments.image_size} pixels, {torch.get_num_threads()} threads: "
          f"{peak() - before:.2f} GB above the {before:.2f} GB with the model, {seconds:.0f} s, "
          f"{distances.shape[0]} x {distances.shape[1]} heads")  # fmt: skip


if __name__ == "__main__":
    main()
