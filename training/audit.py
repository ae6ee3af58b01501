"""Audit a dataset: the same as `hf-vit audit`, for launchers.

accelerate launch training/audit.py ti16 FOLDER
accelerate launch -m hf_vit.scripts.audit ti16 FOLDER
"""

import sys

from hf_vit_command import main as run_command


def main() -> None:
    """Run the command; `accelerate launch --tpu` calls this function in each process."""
    sys.exit(run_command(["audit", *sys.argv[1:]]))


if __name__ == "__main__":
    main()
