"""Program `hf-vit`."""

import argparse
import inspect
import shlex
import sys
import textwrap
from collections.abc import Iterator, Sequence
from importlib import import_module

from ..files.messages import check_choice, user_errors
from ..files.removed_names import check_removed
from ..settings.parser import OptionParser, check_order
from .arguments import add_arguments, check_outputs, place_data
from .parts import rent, start_job

SCRIPTS = {  # also started by the scripts of the folder training/; their options are settings
    "finetune": "Fine-tune a model on your images.",
    "pretrain": "Train a model from random weights, with labels or by masked patch prediction.",
    "audit": "Find label errors, duplicates, leaks, outliers and poor images in a dataset.",
    "evaluate": "Evaluate a model: accuracy, ReaL, ObjectNet, few-shot, linear probe, k-NN or VTAB.",
}
_TASKS = {  # the other commands as MODULE.FUNCTION; a module is imported for its own commands
    "classify and search images": "prediction.predict retrieval.embed retrieval.search demo.demo",
    "find and convert checkpoints": "conversion.catalog conversion.convert conversion.export conversion.fingerprint",
    "train": "finetune pretrain training.soup training.plan training.recipes training.launch_configs training.shard",
    "evaluate and study": "audit evaluate quantization.calibrate analysis.inspect analysis.compute",
    "deploy and publish": "conversion.compile quantization.quantize benchmark.benchmark hub.push hub.card hub.verify",
    "set up": "environment.env environment.completion",
}
_FUNCTIONS = {  # by the name of the command
    function.split(".")[-1].replace("_", "-"): function for names in _TASKS.values() for function in names.split()
}


_IN_PARTS = ("embed", "predict")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; an error is one sentence on standard error, with status 2."""
    given = list(sys.argv[1:] if argv is None else argv)
    name = given[0] if given else ""
    try:
        with user_errors(f"hf-vit {name}".strip()):
            if name in SCRIPTS:
                from .training import run_training

                run_training(name, given[1:])
                return 0
            if name and not name.startswith("-"):
                check_removed("command", name)
                check_choice("command", name, _FUNCTIONS)
            if "" in given:
                raise ValueError(f"an argument is empty: {shlex.join(given)}")
            if name in _FUNCTIONS:
                arguments = vars(commands_of(build_parser(name))[name].parse_args(given[1:]))
            else:
                arguments = vars(build_parser().parse_args(given))  # --help, --version, or the error of no command
            run = arguments.pop("run")
            if "data" in arguments:
                place_data(name, arguments)
            check_outputs(arguments)
            if isinstance(arguments.get("data"), str):
                check_order(f"hf-vit {name}", arguments["folder"], arguments["data"])
            if name in _IN_PARTS:
                where = rent(**{option: arguments.pop(option) for option in ("job", "package", "timeout")})
                if where is not None:
                    start_job(name, given[1:], arguments, where)
                    return 0
            run(**arguments)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def build_parser(only: str | None = None) -> argparse.ArgumentParser:
    """Build the parser of all commands, or with one of them, which imports less."""
    parser = argparse.ArgumentParser(
        prog="hf-vit",
        description="The original Vision Transformer family in the Hugging Face ecosystem.",
        formatter_class=_TasksFormatter,
        allow_abbrev=False,
    )
    if only is None:
        from .environment import own_version

        parser.add_argument("--version", action="version", version=own_version())
    subparsers = parser.add_subparsers(
        dest="command", metavar="COMMAND", required=True, parser_class=OptionParser, help="see below"
    )
    lines = []
    for task, commands in _TASKS.items():
        lines.append(f"\n{task}:")
        for function in commands.split():
            module, _, attribute = function.rpartition(".")
            name = attribute.replace("_", "-")
            if only not in (None, name):
                continue
            if name in SCRIPTS:
                about = SCRIPTS[name]
                subparsers.add_parser(name, help=about, description=about, add_help=False)
            else:
                run = getattr(import_module(f".{module}", __package__), attribute)
                about, _, more = (inspect.getdoc(run) or "").partition("\n\n")
                command = subparsers.add_parser(name, help=about, description=about, epilog=more)
                command.set_defaults(run=run)
                add_arguments(command, run)
                if name in _IN_PARTS:
                    add_arguments(command, rent)
            lines += textwrap.wrap(about, initial_indent=f"  {name:16}", subsequent_indent=" " * 18)
    parser.epilog = "\n".join([*lines, "\nEach command has its own --help."])
    return parser


class _TasksFormatter(argparse.RawDescriptionHelpFormatter):
    """Formatter without argparse's list of commands, which are listed by task instead."""

    def _iter_indented_subactions(self, action: argparse.Action) -> Iterator[argparse.Action]:
        return iter(())


def commands_of(parser: argparse.ArgumentParser) -> dict[str, OptionParser]:
    """Return the parsers of the commands by their names."""
    return next(action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction))
