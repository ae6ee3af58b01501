"""Cost of resampled position embeddings, compared with stored ones.

    python benchmarks/resampling.py [--variant S/16] [--rounds 30]

Two models with the same random weights take images of 288 pixels. One stores position embeddings for 288 pixels, the
other stores them for 224 pixels and resamples them. The resampled table is computed at the first forward of a size and
then cached; both times are printed.
"""

import argparse
import statistics

import torch
from common import seconds_of, speed_up, take_turns

from hf_vit import HfViTConfig, HfViTModel

_SIZE = 288  # pixels


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", default="S/16")
    parser.add_argument("--rounds", type=int, default=30)
    arguments = parser.parse_args()
    resampling = HfViTModel(HfViTConfig.from_variant(arguments.variant)).eval()
    stored = HfViTModel(HfViTConfig.from_variant(arguments.variant, image_size=_SIZE)).eval()
    pixel_values = torch.rand(4, 3, _SIZE, _SIZE)
    stored(pixel_values)
    grid = (_SIZE // 16, _SIZE // 16)
    first = seconds_of(lambda: resampling.embeddings.position_embeddings_for(grid, pixel_values))
    contest = {"stored": lambda: stored(pixel_values), "resampling": lambda: resampling(pixel_values)}
    turns = take_turns(contest, least=arguments.rounds, most=arguments.rounds)
    forward, ratio = statistics.median(turns["stored"]), speed_up(turns, "stored", "resampling")["pair_quartiles"][1]
    look_up = seconds_of(lambda: resampling.embeddings.position_embeddings_for(grid, pixel_values))
    print(f"{arguments.variant}, 4 images of {_SIZE} pixels: {1000 * forward:.1f} ms a forward with stored positions")
    print(f"resampled / stored: {ratio:.4f}")
    print(f"the first table {1000 * first:.2f} ms, {first / forward:.2%} of a forward")
    print(f"a kept table {1000 * look_up:.3f} ms, {look_up / forward:.3%}")


if __name__ == "__main__":
    main()
