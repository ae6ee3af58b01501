"""Self-contained HTML pages: one file with its style inside, without network access or scripts."""

import base64
from functools import cache
from importlib.resources import files
from typing import Any

import jinja2

from .versions import versions_of


def render_page(package: str, template: str, **content: Any) -> str:
    """Render a template as an HTML page; text in `content` is escaped.

    All our pages extend base.html.jinja and have the variables `style` (a style sheet) and `version`.

    Args:
        package: package that holds the template, as a dotted name.
        template: file name of the template.
        content: variables of the template.

    Raises:
        jinja2.UndefinedError: the template uses a variable that `content` lacks.
    """
    version = versions_of(("hf_vit",))["hf_vit"]
    return _environment(package).get_template(template).render(style=_read_style(), version=version, **content)


@cache
def _environment(package: str) -> jinja2.Environment:
    """Return what loads the templates of a package and keeps them compiled."""
    loaders = [jinja2.PackageLoader(name, "") for name in (package, "hf_vit.files")]
    return jinja2.Environment(
        loader=jinja2.ChoiceLoader(loaders),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )


def data_uri(kind: str, content: bytes) -> str:
    """Return an image of a kind such as "png" as a data: URI."""
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def page_color(name: str) -> str:
    """Return a color of our pages, such as "bar", for pictures on them."""
    return _read_style().split(f"--{name}: ")[1].split(";")[0]


def _read_style() -> str:
    return files("hf_vit.files").joinpath("page.css").read_text(encoding="utf-8")
