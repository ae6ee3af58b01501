"""Messages for users: errors as one sentence and an exit status; progress bars of other libraries are silenced."""

import io
import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from typing import Any, TextIO

from ..models.sizes import check_choice as check_choice
from ..models.sizes import did_you_mean as did_you_mean
from .addresses import redact_secrets
from .limits import MAX_MESSAGE
from .printable import printable as printable
from .versions import extra_of

# Errors that the user can correct; ImportError: an extra is not installed.
USER_ERRORS = (ValueError, OSError, ImportError, MemoryError)
FAILED, INTERRUPTED, UNREAD = 2, 130, 141  # exit statuses; the last two are a shell's for SIGINT and SIGPIPE
_MAX_WORD = 500  # characters of a word in a message, such as a name in a file
_LAST_ERROR = re.compile(r"^[\w.]+: (.+)$", re.MULTILINE)


class _PrintableOutput:
    """Text stream that writes what is `printable`, also names that the stream's encoding lacks."""

    def __init__(self, stream: TextIO):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
        self._stream = stream

    def write(self, text: str) -> int:
        return self._stream.write(printable(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def user_errors(program: str, *more: type[Exception]) -> Iterator[None]:
    """Print an error that the user can correct, or Ctrl+C, as one sentence on standard error, and exit.

    A closed standard output (`hf-vit predict ... | head`) ends the program without a message. Control characters are
    escaped.

    Args:
        program: beginning of the sentence.
        more: further exceptions that the user can correct.

    Raises:
        SystemExit: with status 2, 130 after Ctrl+C, or 141 if standard output was closed.
    """
    try:
        output: Any = sys.stdout and _PrintableOutput(sys.stdout)
        try:
            with redirect_stdout(output):
                yield
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # Python's own flush at the end would only warn
    except (*USER_ERRORS, *more, RuntimeError) as error:
        if not isinstance(error, (*USER_ERRORS, *more)) and not _is_about_memory(error):
            raise
        _discard_output()
        if isinstance(error, BrokenPipeError) and sys.stdout is not None and not sys.stdout.isatty():
            raise SystemExit(UNREAD) from None
        print(f"{program}: {format_error(error)}", file=sys.stderr)
        raise SystemExit(FAILED) from None
    except KeyboardInterrupt as error:
        print(f"{program}: {str(error) or 'interrupted; no partial output was left'}", file=sys.stderr)
        raise SystemExit(INTERRUPTED) from None


def _discard_output() -> None:
    """Discard the rest of standard output if it cannot be written, or Python would warn at its end."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        if (output := sys.__stdout__) is not None:
            with suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), output.fileno())


def _is_about_memory(error: BaseException) -> bool:
    """Return whether memory ran out; PyTorch raises RuntimeError for it."""
    signs = ("out of memory", "not enough memory", "can't allocate memory")
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)
    )


def format_error(error: BaseException) -> str:
    """Return an error's message on one line, cut after `MAX_MESSAGE` characters."""
    text = str(error)
    if _is_about_memory(error):
        first = text.partition("\n")[0].rstrip(".")
        text = f"out of memory ({first or 'no amount given'}): use smaller batches or images"
    package = str(error.name).partition(".")[0] if isinstance(error, ImportError) else ""
    if extra := extra_of(package):
        text = f"this needs {package}, which is not installed: pip install 'hf_vit[{extra}]'"
    elif isinstance(error, OSError) and error.strerror and text.startswith("[Errno"):
        text = f"cannot use {error.filename}: {error.strerror}" if error.filename else error.strerror
    if "in DataLoader worker process" in text[:100] and (found := _LAST_ERROR.findall(text)):
        text = found[-1]  # the worker's error, without its traceback
    words = redact_secrets(text[: 16 * MAX_MESSAGE]).split()
    words = [word if len(word) <= _MAX_WORD else f"{word[:100]} ... {word[-100:]}" for word in words]
    text = printable(" ".join(words)[: 2 * MAX_MESSAGE]) or type(error).__name__
    return text if len(text) <= MAX_MESSAGE else f"{text[:MAX_MESSAGE]} ..."


def with_dashes(text: str) -> str:
    """Write an option with dashes: `--image_size=384` -> `--image-size=384`; any other text is returned unchanged."""
    name, equals, value = text.partition("=")
    return f"{name.replace('_', '-')}{equals}{value}" if name.startswith("--") else text


def describe_unknown(argument: str, known: Iterable[str]) -> str:
    """Describe an argument of a command that is not one of the `known` options, or is one too many."""
    if not argument.startswith("-"):
        return f"there is one argument too many: {argument}"
    is_file = os.path.lexists(argument)
    hint = f"; write ./{argument} for the file" if is_file else did_you_mean(argument.split("=")[0], known)
    return f"there is no option {argument}{hint}"


def join_names(names: list[str], most: int = 5) -> str:
    """List the first `most` names and count the rest: "a, b and 3 more"."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def shorten(value: object) -> str:
    """Return the `repr` of a value, shortened to fit into a sentence."""
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:100]} ... {text[-100:]}"


def silence_progress_bars() -> None:
    """Disable transformers' progress bars, which last a fraction of a second; downloads keep theirs."""
    from huggingface_hub import constants
    from huggingface_hub.utils import enable_progress_bars
    from transformers.utils import logging

    logging.disable_progress_bar()  # also disables the bars of downloads
    if not constants.HF_HUB_DISABLE_PROGRESS_BARS:
        enable_progress_bars()
