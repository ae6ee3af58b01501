"""Evaluate a saved model: the same as `hf-vit evaluate`, for launchers.

accelerate launch training/evaluate.py out FOLDER
accelerate launch -m hf_vit.scripts.evaluate out FOLDER
"""

import sys

from hf_vit_command import main as run_command


def main() -> None:
    """Run the command; `accelerate launch --tpu` calls this function in each process."""
    sys.exit(run_command(["evaluate", *sys.argv[1:]]))


if __name__ == "__main__":
    main()
