"""Report as one HTML file, with its pictures inside, without network access and scripts."""

import base64
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from PIL import Image

from ..files.pages import render_page
from .figures import darken
from .observing import NotInThisModel

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Picture(NamedTuple):
    """Picture of the report."""

    file: str
    caption: str
    data: str  # as a data: URI
    dark: str  # the same for the dark color scheme


class Report:
    """Pictures and problems of a report; a part that fails does not stop the others.

    Args:
        folder: folder for the pictures and report.html.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.pictures: dict[str, Picture] = {}
        self.missing: list[str] = []  # parts that the model does not have
        self.problems: list[str] = []

    @contextmanager
    def attempt(self, what: str = "") -> Iterator[None]:
        """Turn an error of the block into a sentence of the report, which begins with `what`."""
        try:
            yield
        except NotInThisModel as error:
            self.missing.append(str(error))
        except (ValueError, OSError) as error:
            sentence = " ".join(str(error).split())
            self.problems.append(sentence if what in sentence else f"{what}: {sentence}")

    def draw(self, file: str, caption: str, plot: Callable[[], "Figure"]) -> None:
        """Draw a picture, save it as `file`, and keep it for the report."""
        figure, dark = plot(), io.BytesIO()
        figure.savefig(self.folder / file)
        darken(figure)
        figure.savefig(dark, format="png")
        self.pictures[file] = Picture(file, caption, _as_uri(self.folder / file), _as_uri(dark))

    def write(self, **content: Any) -> None:
        """Render report.html; `content` is shown besides pictures and problems."""
        shown = {"pictures": self.pictures, "missing": self.missing, "problems": self.problems}
        html = render_page("hf_vit.analysis", "report.html.jinja", **shown, **content)
        (self.folder / "report.html").write_text(html, encoding="utf-8")


def _as_uri(file: Path | io.BytesIO) -> str:
    """Return a picture as a data: URI, compressed."""
    small = io.BytesIO()
    with Image.open(file, formats=["PNG"]) as picture:
        picture.convert("RGB").save(small, "webp", quality=90)
    return "data:image/webp;base64," + base64.b64encode(small.getvalue()).decode()
