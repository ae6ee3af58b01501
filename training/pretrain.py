"""Train a Vision Transformer from random weights, with labels or by masked patch prediction.

    hf-vit pretrain --recipe digits --output-dir out
    accelerate launch -m hf_vit.scripts.pretrain --recipe digits --output-dir out
    accelerate launch training/pretrain.py --recipe digits --output-dir out

All three run this script. `--help` explains every setting.
"""

import sys
from pathlib import Path
from typing import Any

if Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
    sys.path.pop(0)  # otherwise evaluate.py in this folder hides the package of that name

try:
    from hf_vit.training.announcing import announce, conclude
    from hf_vit.training.assembly import open_splits, start
    from hf_vit.training.models import build_for_pretraining
    from hf_vit.training.options import parse_settings
    from hf_vit.training.recipes import show
    from hf_vit.training.running import run_script, train_and_save
    from hf_vit.training.settings import PretrainSettings
except KeyboardInterrupt:  # the imports take seconds
    print("error: interrupted", file=sys.stderr)
    sys.exit(130)


def pretrain(argv: list[str] | None = None) -> dict[str, Any]:
    """Train a model; return the metrics, which are also saved in `output_dir`."""
    # The settings: declared in training/settings.py, set by recipes/*.yaml and the command line.
    settings = parse_settings(PretrainSettings, argv, "hf-vit pretrain")
    if settings.print_config:
        return show(settings)
    # The accelerator: processes, device and precision of `accelerate launch`.
    accelerator = start(settings)
    # The data: opened by hf_vit/data/sources.py; masked patch prediction needs no labels.
    split, eval_split = open_splits(settings, needs_labels=settings.objective == "supervised")
    # The model: `variant` and `config`, with the original's initialisation (training/models.py).
    model, processor = build_for_pretraining(settings, split)
    # The plan of the run, printed.
    announce(settings, accelerator, model, split, eval_split)
    # The training: optimiser, schedule and augmentation (training/assembly.py); the loop with its checkpoints and
    # evaluations (training/loop.py); then the model, its processor, metrics and the learning curve are saved.
    metrics = train_and_save(settings, accelerator, model, processor, split, eval_split)
    conclude(settings, accelerator, metrics)
    accelerator.end_training()
    return metrics


def main(argv: list[str] | None = None) -> None:
    """Run the script; `accelerate launch --tpu` calls this function in each process."""
    run_script(pretrain, argv)


if __name__ == "__main__":
    main()
