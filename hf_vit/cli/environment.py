"""`hf-vit env` and `hf-vit completion`."""

import platform
import sys
from typing import Annotated, Literal

from ..files.versions import EXTRAS, versions_of

_CORE = ("hf_vit", "torch", "transformers", "huggingface-hub", "safetensors", "numpy", "pillow")


def own_version() -> str:
    """Return name and version of the program: `hf-vit 0.1.0`."""
    return f"hf-vit {versions_of(['hf_vit'])['hf_vit']}"


def env() -> None:
    """Print versions, extras and devices, for a bug report."""
    print(f"Python {platform.python_version()} on {platform.platform()}")
    for name, version in versions_of(_CORE).items():
        print(f"{name:18}{version}")
    for extra, packages in EXTRAS.items():
        found = versions_of(packages)
        print(f"[{extra}]".ljust(18) + ", ".join(f"{name} {version}" for name, version in found.items()))
    from ..data.devices import list_devices

    print(f"{'devices':18}{', '.join(list_devices())}")


def completion(
    shell: Annotated[Literal["bash", "zsh", "tcsh"], 'shell; load the script with `eval "$(hf-vit completion bash)"`'],
) -> None:
    """Print a shell script for tab completion of the commands; needs the package shtab."""
    import shtab

    from ..settings.options import add_options
    from .command_line import SCRIPTS, build_parser, commands_of
    from .training import settings_of

    parser = build_parser()
    commands = commands_of(parser)
    for name in SCRIPTS:
        add_options(commands[name], settings_of(name))
    for command in commands.values():
        for action in command._actions:
            if action.nargs != 0 and not action.choices and action.type not in (int, float):
                action.complete = shtab.FILE  # pyright: ignore[reportAttributeAccessIssue] - shtab reads it
    sys.stdout.write(shtab.complete(parser, shell))
