"""Train a Vision Transformer from random weights, with labels or by masked patch prediction.

    hf-vit pretrain --recipe digits --output-dir out
    accelerate launch -m hf_vit.scripts.pretrain --recipe digits --output-dir out
    accelerate launch training/pretrain.py --recipe digits --output-dir out

These commands all run this script. `--help` explains every setting.
"""

import shlex
import sys
from pathlib import Path
from typing import Any

if Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
    sys.path.pop(0)  # otherwise evaluate.py in this folder would hide the package `evaluate`

try:
    from hf_vit.settings.fields import PretrainSettings
    from hf_vit.settings.options import parse_settings
    from hf_vit.settings.recipes import show
    from hf_vit.training.api import run_pretraining, run_script
except KeyboardInterrupt:  # imports take seconds
    print("error: interrupted", file=sys.stderr)
    sys.exit(130)


def pretrain(argv: list[str] | None = None) -> dict[str, Any]:
    """Train a model; return the metrics, which are also saved in `output_dir`."""
    # The settings: declared in hf_vit/settings/fields.py, set by recipes/*.yaml and the command line.
    given = sys.argv[1:] if argv is None else argv
    settings = parse_settings(PretrainSettings, given, "hf-vit pretrain")
    if settings.print_config:
        return show(settings)
    # The run: hf_vit/training/api.py builds its parts, and `Trainer.fit` in hf_vit/training/trainer.py runs it.
    return run_pretraining(settings, shlex.join(["hf-vit", "pretrain", *given]))


def main(argv: list[str] | None = None) -> None:
    """Run the script; `accelerate launch --tpu` calls this function in each process."""
    run_script(pretrain, argv)


if __name__ == "__main__":
    main()
