"""Evaluate a saved model: its accuracy, or by one of the protocols of the paper and its successors.

    python training/evaluate.py --model out --dataset DATASET --split test
    python training/evaluate.py --model out --dataset DATASET --protocol few_shot --output_dir results

Protocols: accuracy, real, objectnet, few_shot, linear_probe, knn and vtab; see hf_vit/evaluation.

The page that says what happens, which `hf-vit` runs too, is `evaluate` in hf_vit/evaluation/commands.py:
settings, accelerator, the protocol, what is written.
"""

import sys
from pathlib import Path

if Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
    sys.path.pop(0)  # or evaluate.py in this folder would hide the package of that name

try:
    from hf_vit.evaluation.commands import evaluate
    from hf_vit.training.commands import main as run_command
except KeyboardInterrupt:  # they take seconds to import
    print("error: interrupted", file=sys.stderr)
    sys.exit(130)


def main() -> None:
    """What `accelerate launch --tpu` calls in each process."""
    run_command(evaluate)


if __name__ == "__main__":
    main()
