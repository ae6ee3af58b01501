"""The parser of every command line: names of options, suggestions for unknown ones, mistakes as one sentence."""

import argparse
import sys
from collections.abc import Iterable
from typing import Any, NoReturn

from ..files.messages import describe_unknown, with_dashes

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


class SettingsError(ValueError):
    """Error for a setting that is unknown, of the wrong type, or contradicts another one."""


class OptionParser(argparse.ArgumentParser):
    """Argument parser that raises SettingsError for a mistake, and accepts options with underscores."""

    def __init__(self, **options: Any):
        super().__init__(allow_abbrev=False, **options)  # otherwise argparse accepts `--learning-rat`

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse options and words in any order."""
        given = list(sys.argv[1:] if args is None else args)
        known = [option for action in self._actions for option in action.option_strings]
        names = given.index("--") if "--" in given else len(given)  # no options from there on
        given = [*(_own_name(text, known) for text in given[:names]), *given[names:]]
        values, unknown = self.parse_known_intermixed_args(given, namespace)
        if unknown:
            self.error(describe_unknown(unknown[0], known))
        return values

    def error(self, message: str) -> NoReturn:
        """Raise SettingsError."""
        raise SettingsError(message)


def _own_name(text: str, known: Iterable[str]) -> str:
    """Write an option with dashes and, if another library calls it otherwise, with our name: --lr=1 -> ..."""
    name, equals, value = with_dashes(text).partition("=")
    own = f"--{SAME_ELSEWHERE.get(name.removeprefix('--'))}"
    return f"{own if name.startswith('--') and name not in known and own in known else name}{equals}{value}"
