"""Evaluate a saved model: its accuracy, or another protocol of the paper and its successors.

    hf-vit evaluate --model out --dataset FOLDER --split test
    hf-vit evaluate --model out --dataset FOLDER --protocol few_shot --output-dir results
    accelerate launch training/evaluate.py --model out --dataset FOLDER

These commands all run this script. `--help` explains every setting.
"""

import sys
from pathlib import Path
from typing import Any

if Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
    sys.path.pop(0)  # otherwise evaluate.py in this folder would hide the package `evaluate`

try:
    import json

    from accelerate import PartialState

    from hf_vit.evaluation.protocols import run_protocol, summarize
    from hf_vit.settings.fields import EvaluateSettings
    from hf_vit.settings.options import parse_settings
    from hf_vit.settings.recipes import show
    from hf_vit.training.api import run_script
except KeyboardInterrupt:  # imports take seconds
    print("error: interrupted", file=sys.stderr)
    sys.exit(130)


def evaluate(argv: list[str] | None = None) -> dict[str, Any]:
    """Evaluate a model by the chosen protocol; return the metrics.

    They are printed as JSON on standard output, and as a table on standard error.
    """
    # The settings: declared in hf_vit/settings/fields.py.
    settings = parse_settings(EvaluateSettings, argv, "hf-vit evaluate")
    if settings.print_config:
        return show(settings)
    # The protocol: accuracy, real and objectnet (evaluation/classification.py), few_shot, linear_probe, knn, vtab.
    metrics = run_protocol(settings)
    processes = PartialState()
    if processes.is_main_process:
        print(json.dumps(metrics, indent=2))
        print(summarize(metrics), file=sys.stderr)
    processes.destroy_process_group()
    return metrics


def main(argv: list[str] | None = None) -> None:
    """Run the script; `accelerate launch --tpu` calls this function in each process."""
    run_script(evaluate, argv)


if __name__ == "__main__":
    main()
