"""Fine-tune a pretrained Vision Transformer for image classification: the same as `hf-vit finetune`, for launchers.

accelerate launch training/finetune.py ti16 FOLDER out
accelerate launch -m hf_vit.scripts.finetune ti16 FOLDER out
"""

import sys

from hf_vit_command import main as run_command


def main() -> None:
    """Run the command; `accelerate launch --tpu` calls this function in each process."""
    sys.exit(run_command(["finetune", *sys.argv[1:]]))


if __name__ == "__main__":
    main()
