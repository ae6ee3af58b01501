"""Fine-tune a pretrained Vision Transformer for image classification.

    accelerate launch training/finetune.py --recipe training/recipes/finetune_flowers.yaml \
        --model google/vit-base-patch16-224-in21k --dataset DATASET --output_dir out

The page that says what happens, which `hf-vit` runs too, is `finetune` in hf_vit/training/commands.py:
settings, accelerator, data, a pretrained model with a new head, training, what
is written.
"""

import sys
from pathlib import Path

if Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
    sys.path.pop(0)  # or evaluate.py in this folder would hide the package of that name

try:
    from hf_vit.training.commands import finetune
    from hf_vit.training.commands import main as run_command
except KeyboardInterrupt:  # they take seconds to import
    print("error: interrupted", file=sys.stderr)
    sys.exit(130)


def main() -> None:
    """What `accelerate launch --tpu` calls in each process."""
    run_command(finetune)


if __name__ == "__main__":
    main()
