"""Train a Vision Transformer from random weights: the same as `hf-vit pretrain`, for launchers.

accelerate launch training/pretrain.py --recipe digits --output-dir out
accelerate launch -m hf_vit.scripts.pretrain --recipe digits --output-dir out
"""

import sys

from hf_vit_command import main as run_command


def main() -> None:
    """Run the command; `accelerate launch --tpu` calls this function in each process."""
    sys.exit(run_command(["pretrain", *sys.argv[1:]]))


if __name__ == "__main__":
    main()
