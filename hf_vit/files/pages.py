"""Self-contained HTML pages: one file with its style inside, without network access or scripts."""

from importlib.resources import files
from typing import Any

import jinja2


def render_page(package: str, template: str, **content: Any) -> str:
    """Render a template as an HTML page with the style sheet of all our pages; text in `content` is escaped.

    Args:
        package: package that holds the template, as a dotted name.
        template: file name of the template.
        content: variables of the template.

    Raises:
        jinja2.UndefinedError: the template uses a variable that `content` lacks.
    """
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    source = files(package).joinpath(template).read_text(encoding="utf-8")
    return environment.from_string(source).render(style=_read_style(), **content)


def page_color(name: str, dark: bool = False) -> str:
    """Return a color of our pages in the light or dark scheme, such as "bar", for pictures on them."""
    return _read_style().split(f"--{name}: ")[1 + dark].split(";", 1)[0]


def _read_style() -> str:
    return files("hf_vit.files").joinpath("page.css").read_text(encoding="utf-8")
