"""Parser of every command line, which imports nothing of other packages."""

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

from ..files.messages import describe_unknown, with_dashes
from ..files.removed_names import describe_removed

# Options of timm's train.py and of transformers' Trainer whose values mean the same, such as `--lr 1e-3`.
SAME_ELSEWHERE = {
    "lr": "learning-rate",
    "opt": "optimizer",
    "sched": "schedule",
    "img-size": "image-size",
    "num-classes": "num-labels",
    "workers": "num-workers",
    "dataloader-num-workers": "num-workers",
    "smoothing": "label-smoothing",
    "mixup": "mixup-alpha",
    "cutmix": "cutmix-alpha",
    "clip-grad": "max-grad-norm",
    "num-train-epochs": "epochs",
    "model-name-or-path": "model",
    "data-dir": "dataset",
    "dataset-name": "dataset",
    "for": "save-for",
}


class OptionParser(argparse.ArgumentParser):
    """Argument parser that raises ValueError for a mistake, and accepts options with underscores."""

    def __init__(self, **options: Any):
        super().__init__(allow_abbrev=False, **options)  # otherwise argparse accepts `--learning-rat`

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse options and words in any order."""
        given = list(sys.argv[1:] if args is None else args)
        known = [option for action in self._actions for option in action.option_strings]
        names = given.index("--") if "--" in given else len(given)  # no options from there on
        for text in given[:names]:
            option = with_dashes(text).split("=")[0]
            setting = option.removeprefix("--").replace("-", "_")
            removed = describe_removed(option) or describe_removed(f"setting {setting}")
            if removed is not None and option not in known:  # before argparse asks for missing arguments
                self.error(removed)
        given = [*(_translate_option(text, known) for text in given[:names]), *given[names:]]
        values, unknown = self.parse_known_intermixed_args(given, namespace)
        if unknown:
            self.error(describe_unknown(unknown[0], known))
        return values

    def error(self, message: str) -> NoReturn:
        """Raise ValueError."""
        raise ValueError(message)


def check_order(program: str, model: str, data: str) -> None:
    """Raise ValueError if a folder of images stands where the model belongs: the order is MODEL DATA [OUTPUT]."""
    folder = Path(model)
    if not folder.is_dir() or any(folder.glob("*.json")):  # every folder of a model has a config.json
        return
    is_model = any(Path(data, name).is_file() for name in ("config.json", "adapter_config.json"))
    if is_model or not Path(data).exists():
        raise ValueError(f"{model} is a folder without a model; the model comes first: {program} {data} {model}")


def _translate_option(text: str, known: Iterable[str]) -> str:
    """Translate an option of timm or Trainer to ours, with dashes: --lr=1 -> --learning-rate=1."""
    name, equals, value = with_dashes(text).partition("=")
    own = f"--{SAME_ELSEWHERE.get(name.removeprefix('--'))}"
    return f"{own if name.startswith('--') and name not in known and own in known else name}{equals}{value}"
