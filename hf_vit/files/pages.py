"""Pages of HTML that are one file: their style is in it, and they need no network and no script."""

from importlib.resources import files
from typing import Any

import jinja2


def render_page(package: str, template: str, **content: Any) -> str:
    """Render a template of a package; text in `content` is escaped, and `style` is the style sheet of all our pages.

    Raises:
        jinja2.UndefinedError: the template asks for something that `content` does not have.
    """
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    style = files("hf_vit.files").joinpath("page.css").read_text(encoding="utf-8")
    source = files(package).joinpath(template).read_text(encoding="utf-8")
    return environment.from_string(source).render(style=style, **content)
