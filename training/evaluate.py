"""Evaluate a saved classifier: loss, top-1 and top-5, mean per-class and, with ReaL labels, ReaL accuracy.

python training/evaluate.py --model out --dataset DATASET --split test
"""

import sys
from pathlib import Path

if Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
    sys.path.pop(0)  # or evaluate.py in this folder would hide the package of that name

from hf_vit.training import commands


def main():
    """What `accelerate launch --tpu` calls in each process."""
    commands.main(commands.evaluate)


if __name__ == "__main__":
    main()
