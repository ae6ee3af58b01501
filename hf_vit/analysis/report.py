"""A report that is one HTML file: pictures are in it, and it needs no network and no script."""

import base64
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from PIL import Image

from ..files.pages import render_page
from .observing import NotInThisModel

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Picture(NamedTuple):
    """A picture of the report."""

    file: str
    caption: str
    data: str  # as a data: URI


class Report:
    """Collects pictures, and what went wrong: one part that fails leaves the others.

    Args:
        folder: where the pictures and report.html go.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.pictures: dict[str, Picture] = {}
        self.missing: list[str] = []  # what such a model does not have
        self.problems: list[str] = []

    @contextmanager
    def attempt(self, what: str = "") -> Iterator[None]:
        """What fails in the block becomes a sentence of the report."""
        try:
            yield
        except NotInThisModel as error:
            self.missing.append(str(error))
        except (ValueError, OSError) as error:
            sentence = " ".join(str(error).split())
            self.problems.append(sentence if what in sentence else f"{what}: {sentence}")

    def draw(self, file: str, caption: str, plot: Callable[[], "Figure"]) -> None:
        """Draw a picture, save it as `file`, and keep it for the report."""
        plot().savefig(self.folder / file)
        small = io.BytesIO()
        with Image.open(self.folder / file) as picture:
            picture.convert("RGB").save(small, "webp", quality=90)
        data = "data:image/webp;base64," + base64.b64encode(small.getvalue()).decode()
        self.pictures[file] = Picture(file, caption, data)

    def write(self, **content: Any) -> None:
        """Render report.html; `content` is what the template shows besides pictures and problems."""
        shown = {"pictures": self.pictures, "missing": self.missing, "problems": self.problems}
        html = render_page("hf_vit.analysis", "report.html.jinja", **shown, **content)
        (self.folder / "report.html").write_text(html, encoding="utf-8")
