"""The end of a program that was given something it cannot use: one sentence and an exit status, no traceback."""

import difflib
import re
import reprlib
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from .limits import MAX_MESSAGE

# Errors that the user can mend; ImportError: an extra is not installed.
USER_ERRORS = (ValueError, OSError, ImportError, MemoryError)
FAILED, INTERRUPTED = 2, 130  # exit statuses
_LAST_ERROR = re.compile(r"^[\w.]+: (.+)$", re.MULTILINE)


@contextmanager
def ends_in_one_sentence(program: str, *more: type[Exception]) -> Iterator[None]:
    """Turn an error that the user can mend into one sentence on standard error, and so Ctrl+C.

    Args:
        program: what the sentence begins with.
        more: errors of this program that the user can mend too.

    Raises:
        SystemExit: with the status 2, or 130 after Ctrl+C.
    """
    try:
        yield
    except (*USER_ERRORS, *more) as error:
        print(f"{program}: {one_sentence(error)}", file=sys.stderr)
        raise SystemExit(FAILED) from None
    except KeyboardInterrupt:
        print(f"{program}: interrupted; nothing half-written was left", file=sys.stderr)
        raise SystemExit(INTERRUPTED) from None


def one_sentence(error: BaseException) -> str:
    """An error on one line, cut where it is longer than anyone reads."""
    text = str(error)
    if "in DataLoader worker process" in text[:100] and (found := _LAST_ERROR.findall(text)):
        text = found[-1]  # of what a worker met, without its traceback
    text = " ".join(text[: 2 * MAX_MESSAGE].split()) or type(error).__name__
    return text if len(text) <= MAX_MESSAGE else f"{text[:MAX_MESSAGE]} ..."


def with_dashes(text: str) -> str:
    """`--image_size=384` -> `--image-size=384`; what is no option stays."""
    name, equals, value = text.partition("=")
    return f"{name.replace('_', '-')}{equals}{value}" if name.startswith("--") else text


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a sentence about an unknown name: the known one that is most like it, or nothing."""
    found = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {found[0]}?" if found else ""


def shorten(value: object) -> str:
    """A value as Python writes it, cut where it is long: whatever a file holds fits into a sentence."""
    return _SHORT.repr(value)


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 100
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxdict = 8
_SHORT.maxlevel = 3
