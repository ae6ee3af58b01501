"""Fine-tune a pretrained Vision Transformer for image classification.

    hf-vit finetune --model ti16 --dataset FOLDER --output-dir out --recipe finetune_small
    accelerate launch -m hf_vit.scripts.finetune --model ti16 --dataset FOLDER --output-dir out --recipe finetune_small
    accelerate launch training/finetune.py --model ti16 --dataset FOLDER --output-dir out --recipe finetune_small

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
    from hf_vit.training.models import load_for_finetuning
    from hf_vit.training.options import parse_settings
    from hf_vit.training.recipes import show
    from hf_vit.training.running import run_script, train_and_save
    from hf_vit.training.settings import FinetuneSettings
except KeyboardInterrupt:  # the imports take seconds
    print("error: interrupted", file=sys.stderr)
    sys.exit(130)


def finetune(argv: list[str] | None = None) -> dict[str, Any]:
    """Fine-tune a model; return the metrics, which are also saved in `output_dir`."""
    # The settings: declared in training/settings.py, set by recipes/*.yaml and the command line.
    settings = parse_settings(FinetuneSettings, argv, "hf-vit finetune")
    if settings.print_config:
        return show(settings)
    # The accelerator: processes, device and precision of `accelerate launch`.
    accelerator = start(settings)
    # The data: opened by hf_vit/data/sources.py; hf_vit/data/labels.py gives both splits the same class numbers.
    split, eval_split = open_splits(settings)
    # The model: stored weights and a new head of zeros (training/models.py).
    model, processor = load_for_finetuning(settings, split)
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
    run_script(finetune, argv)


if __name__ == "__main__":
    main()
