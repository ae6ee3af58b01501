"""The end of a program that was given something it cannot use: one sentence and an exit status, no traceback."""

import re
import reprlib
import sys
from collections.abc import Iterator
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


def shorten(value: object) -> str:
    """A value as Python writes it, cut where it is long: whatever a file holds fits into a sentence."""
    return _SHORT.repr(value)


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 100
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxdict = 8
_SHORT.maxlevel = 3
