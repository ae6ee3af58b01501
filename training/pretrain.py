"""Train a Vision Transformer from random weights, with labels or by masked patch prediction.

accelerate launch training/pretrain.py --recipe training/recipes/digits.yaml --output_dir out

The page that says what happens, which `hf-vit` runs too, is `pretrain` in hf_vit/training/commands.py:
settings, accelerator, data, a model with random weights, training, what is written.
"""

import sys
from pathlib import Path

if Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
    sys.path.pop(0)  # or evaluate.py in this folder would hide the package of that name

try:
    from hf_vit.training.commands import main as run_command
    from hf_vit.training.commands import pretrain
except KeyboardInterrupt:  # they take seconds to import
    print("error: interrupted", file=sys.stderr)
    sys.exit(130)


def main() -> None:
    """What `accelerate launch --tpu` calls in each process."""
    run_command(pretrain)


if __name__ == "__main__":
    main()
