"""Hooks of MkDocs: pages from elsewhere in the repository, notebooks, tables made from data, links.

Pages are also read in the repository, so their links point to files. These hooks turn them into links of the site. A
marker such as `<!-- table: recipes -->` is replaced by a table that is made from its source.
"""

import argparse
import ast
import html
import inspect
import json
import logging
import os
import posixpath
import re
import shutil
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from itertools import takewhile
from pathlib import Path
from tempfile import mkdtemp

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Navigation
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
# Page of the site -> file of the repository; only pages that are not files of docs/ with the same name.
ELSEWHERE = {
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    **{  # a README would be taken for the page of the section
        f"benchmarks/{page.name.replace('README', 'measuring')}": f"benchmarks/{page.name}"
        for page in sorted((ROOT / "benchmarks").glob("*.md"))
    },
}
# Module with public names -> title of its page in the reference.
REFERENCE = {
    "hf_vit": "Models, images, loading and the Hub",
    "hf_vit.conversion": "Checkpoints of others, and programs",
    "hf_vit.analysis": "Looking inside",
    "hf_vit.catalog": "Released checkpoints",
    "hf_vit.inference.predictor": "Predictions and features",
    "hf_vit.inference.search": "Search",
}
_LINK = re.compile(r"(?P<before>!?\[(?P<text>[^\]]*)\]\()(?P<target>[^)\s#:]+)(?P<anchor>#[^)\s]*)?\)")
# Front matter of the pages of options, which the search puts before pages that only use them.
_FIRST_IN_SEARCH = ["---", "search:", "  boost: 4", "---", ""]
_PAGES: list[Page] = []  # of the navigation, in order
_MARKER = re.compile(r"<!-- table: (\w+) -->")


class SingularExamples(griffe.Extension):
    """Extension that reads the heading `Example:` of our docstrings; Google's style knows only `Examples:`."""

    def on_object(self, *, obj: griffe.Object, **kwargs) -> None:
        """Rename the section to the name that the parser knows."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^( *)Example:$", r"\1Examples:", obj.docstring.value, flags=re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not files of this folder."""
    for page, path in ELSEWHERE.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / path)))
    for notebook in sorted((ROOT / "docs" / "notebooks").glob("*.ipynb")):
        files.append(File.generated(config, f"notebooks/{notebook.stem}.md", content=_notebook(notebook)))
    files.append(File.generated(config, "reference/index.md", content=_reference_index()))
    for module in REFERENCE:
        files.append(File.generated(config, _reference_page(module), content=_reference_of(module)))
    files.append(File.generated(config, "reference/commands.md", content=_commands()))
    files.append(File.generated(config, "reference/settings.md", content=_settings()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Fill in the tables and turn links between files into links of the site."""
    source = page.file.src_uri
    markdown = _MARKER.sub(lambda found: TABLES[found[1]](), markdown)
    return _LINK.sub(lambda found: _site_link(found, source, files), markdown)


def on_nav(nav: Navigation, config: MkDocsConfig, files: Files) -> None:
    """Keep the navigation for llms.txt."""
    _PAGES[:] = nav.pages


def _site_link(found: re.Match, source: str, files: Files) -> str:
    """Return the same link on the site, or the text alone if the site does not have the file.

    Raises:
        ValueError: the repository does not have the file.
    """
    path = ELSEWHERE.get(source, f"docs/{source}")
    target = posixpath.normpath(posixpath.join(posixpath.dirname(path), found["target"]))
    pages = {path: page for page, path in ELSEWHERE.items()} | {"README.md": "index.md"}
    page = pages.get(target, target.removeprefix("docs/") if target.startswith("docs/") else None)
    if target.endswith(".ipynb") and target != f"{path.removesuffix('.md')}.ipynb":  # its page links to it
        page = f"{target.removeprefix('docs/').removesuffix('.ipynb')}.md"
    if page is None:
        if not (ROOT / target).exists():
            raise ValueError(f"cannot link {path} to {target}: no such file in the repository")
        return found["text"]
    relative = posixpath.relpath(page, posixpath.dirname(source) or ".")
    return f"{found['before']}{relative}{found['anchor'] or ''})"


def _notebook(path: Path) -> str:
    """Return a notebook as a page: text, code and outputs."""
    parts, heading = [], ""
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            heading = (re.findall(r"^#+ (.*)", source, re.MULTILINE) or [heading])[-1]
            parts.append(source)
            continue
        if all(line.startswith(("!", " ")) for line in source.splitlines()):
            parts.append(_fenced("bash", source.replace("!hf-vit", "hf-vit")))
        else:
            parts.append(_fenced("python", source))
        parts += [_output(output, heading) for output in cell["outputs"]]
    title, *rest = parts
    own = f"*This page is a notebook. Download and run it: [{path.name}]({path.name}).*"
    return "\n\n".join([title, own, *rest]) + "\n"


def _output(output: dict, about: str) -> str:
    """Return an output, text or an image, as HTML."""
    data = output.get("data", {})
    for kind in ("image/png", "image/jpeg"):
        if kind in data:
            encoded = "".join(data[kind]).replace("\n", "")
            return f'<img class="output" alt="{html.escape(about)}: the picture" src="data:{kind};base64,{encoded}">'
    text = "".join(output["text"] if "text" in output else data["text/plain"])
    return f'<div class="output" markdown>\n{_fenced("text", text)}\n</div>'


def _fenced(language: str, text: str) -> str:
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}{language}\n{text.strip(chr(10))}\n{fence}"


def _reference_page(module: str) -> str:
    return f"reference/{module.split('.')[-1]}.md"


def public_names(module: str) -> list[str]:
    """Return the functions and classes of `__all__`; without it, all public ones of the module."""
    loaded = import_module(module)
    if hasattr(loaded, "__all__"):
        return [name for name in loaded.__all__ if callable(getattr(loaded, name))]
    return [
        name
        for name, value in vars(loaded).items()
        if not name.startswith("_") and inspect.getmodule(value) is loaded and callable(value)
    ]


def _first_line(module: str, name: str) -> str:
    documented = getattr(import_module(module), name).__doc__ or ""
    return documented.strip().partition("\n\n")[0].replace("\n", " ").replace("|", "\\|")


def _reference_index() -> str:
    lines = [
        "# Reference",
        "",
        "Every public name, from the docstrings. Names with a leading underscore are private. The command line has",
        "its own pages: [commands](commands.md) and [settings of training and evaluation](settings.md).",
        "",
    ]
    for module, title in REFERENCE.items():
        page = posixpath.basename(_reference_page(module))
        lines += [f"## {title}", "", f"`{module}`", "", "| name | what it is |", "| --- | --- |"]
        lines += [
            f"| [`{name}`]({page}#{module}.{name}) | {_first_line(module, name)} |" for name in public_names(module)
        ]
        lines.append("")
    return "\n".join(lines)


def _reference_of(module: str) -> str:
    lines = [f"# {REFERENCE[module]}", "", f"`{module}`", ""]
    for name in public_names(module):
        lines.append(f"::: {module}.{name}")
        value = getattr(import_module(module), name)
        if isinstance(value, type) and issubclass(value, tuple):
            lines.append("    options: {show_if_no_docstring: true}")  # the fields
        lines.append("")
        if pages := _pages_that_show(name):
            lines.append(f"*Shown on:* {', '.join(pages)}\n")
    return "\n".join(lines)


def _pages_that_show(name: str) -> list[str]:
    """Return links to the pages whose Python blocks contain a name."""
    links = []
    for path in sorted((ROOT / "docs").glob("*.md")):
        text = path.read_text(encoding="utf-8")
        blocks = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
        if any(re.search(rf"\b{name}\b", block) for block in blocks):
            links.append(f"[{text.splitlines()[0].removeprefix('# ')}](../{path.name})")
    return links


def _commands() -> str:
    """Return the page of the commands of `hf-vit`, from its parser."""
    from hf_vit.cli import build_parser

    listing = next(a for a in build_parser()._actions if isinstance(a, argparse._SubParsersAction))
    lines = [*_FIRST_IN_SEARCH, "# Commands", "", "`hf-vit COMMAND`, from the text of `hf-vit COMMAND --help`.", ""]
    for name, command in listing.choices.items():
        lines += [f"## hf-vit {name}", "", command.description or "", ""]
        if not command._actions:
            lines += ["It takes the [settings](settings.md).", ""]
        rows = [f"| {option} | {about} |" for option, about in _options_of(command, f"{name}-")]
        lines += ["| argument | what it is |", "| --- | --- |", *rows, ""] if rows else []
    return "\n".join(lines)


def _settings() -> str:
    """Return the page of the settings of training and evaluation, by group, with the commands that take them."""
    from hf_vit.settings.fields import AuditSettings, EvaluateSettings, FinetuneSettings, PretrainSettings
    from hf_vit.settings.options import add_options

    groups: dict[str, dict[tuple[str, str], list[str]]] = {}
    classes = {
        "finetune": FinetuneSettings,
        "pretrain": PretrainSettings,
        "evaluate": EvaluateSettings,
        "audit": AuditSettings,
    }
    for command, settings in classes.items():
        parser = argparse.ArgumentParser(add_help=False)
        add_options(parser, settings)
        for group in parser._action_groups:
            for row in _options_of(group):
                groups.setdefault(group.title or "", {}).setdefault(row, []).append(command)
    lines = [
        *_FIRST_IN_SEARCH,
        "# Settings",
        "",
        "Options of `hf-vit finetune`, `pretrain`, `evaluate` and `audit` (with dashes), fields of a recipe (with "
        "underscores).",
        "",
    ]
    for title, rows in groups.items():
        if rows:
            heading = "Where to start" if title == "options" else title[:1].upper() + title[1:]
            lines += [f"## {heading}", "", "| setting | what it is | of |", "| --- | --- | --- |"]
            for (name, about), of in rows.items():
                lines.append(f"| {name} | {about} | {'all' if len(of) == len(classes) else ', '.join(of)} |")
            lines.append("")
    return "\n".join(lines)


def _options_of(parser, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield name and help of each option of a parser, or of a group of its options.

    The name is a heading with an anchor, so that the search finds `--image-size` by its title.
    """
    actions = parser._group_actions if isinstance(parser, argparse._ArgumentGroup) else parser._actions
    for action in sorted(actions, key=lambda action: bool(action.option_strings)):
        if action.dest == "help" or action.help == argparse.SUPPRESS:
            continue
        name = action.option_strings[-1] if action.option_strings else action.dest.upper()
        value = action.metavar if isinstance(action.metavar, str) and action.option_strings else ""
        about = (action.help or "").replace("%%", "%").replace("|", "\\|").replace("<", "&lt;")
        heading = f'<h3 id="{prefix}{name.lstrip("-")}"><code>{name}</code></h3>'
        yield " ".join([heading, *([f"`{value.replace('|', ' or ')}`"] if value else [])]), about


def _recipes() -> str:
    """Return a table of the recipes for a CPU, and a folded table of the others; the texts come from their files."""
    from hf_vit.settings.recipes import about_recipe, installed_recipes

    heading = ["| recipe | what it is |", "| --- | --- |"]
    small, large = list(heading), list(heading)
    for name, path in installed_recipes().items():
        what, hardware, expected = about_recipe(path)
        more = f"<br><small>Needs: {hardware} Expect: {expected}</small>"
        (small if "CPU" in hardware else large).append(f"| `{name}` | {what}{more} |")
    title = f"{len(large) - 2} recipes for accelerators"
    fold = ["<details markdown>", f"<summary>{title}</summary>", "", *large, "", "</details>"]
    return "\n".join([f"For a CPU or a small GPU ({len(small) - 2} recipes):", "", *small, "", *fold])


def _launch_templates() -> str:
    """Return a table of the launch templates, with the comments at the beginning of each file."""
    rows = ["| template | what it is |", "| --- | --- |"]
    for path in sorted((ROOT / "training" / "accelerate").glob("*.yaml")):
        comments = takewhile(lambda line: line.startswith("#"), path.read_text(encoding="utf-8").splitlines())
        rows.append(f"| `{path.stem}` | {' '.join(line.removeprefix('#').strip() for line in comments)} |")
    return "\n".join(rows)


def _packages() -> str:
    """Return a table of the packages, with the first paragraph of each docstring."""
    rows = ["| package | what it does |", "| --- | --- |"]
    for path in sorted((ROOT / "hf_vit").glob("*/__init__.py")):
        if documented := ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))):
            first = documented.partition("\n\n")[0].replace("\n", " ")
            rows.append(f"| `hf_vit.{path.parent.name}` | {first} |")
    return "\n".join(rows)


@cache
def _digits_page() -> Path | None:
    """Write the page of the demo's digits model; None without the packages, or neither a network nor the runtime."""
    from hf_vit import demo
    from hf_vit.conversion import ConversionError, convert
    from hf_vit.demo.page import write_static_page

    folder, runtime = Path(mkdtemp()), os.environ.get("HF_VIT_WEB_RUNTIME")
    checkpoint = Path(demo.__file__).with_name("digits.npz")
    convert(checkpoint, labels=list("0123456789"), read_weights=False).save(folder / "vit-digits")
    try:
        write_static_page([folder / "vit-digits"], folder / "page", runtime=Path(runtime) if runtime else None)
    except (ImportError, ConversionError) as error:
        logging.getLogger("mkdocs.hooks").info(f"The site is built without the live page: {error}")
        return None
    return folder / "page"


def _live_page() -> str:
    if _digits_page() is None:
        return "(This copy of the site was built without the page itself.)"
    return '<a href="live/index.html">Open the page</a> with a small model of handwritten digits.'


def on_post_build(config: MkDocsConfig) -> None:
    """Write llms.txt and the pages as Markdown, and put the live page into the site, if a page shows it."""
    _write_llms_txt(config)
    if _digits_page.cache_info().currsize and (folder := _digits_page()) is not None:
        shutil.move(folder, Path(config.site_dir, "live"))


def _write_llms_txt(config: MkDocsConfig) -> None:
    """Write llms.txt (https://llmstxt.org), the list of the pages for language models, and each page as Markdown."""
    lines = [f"# {config.site_name}", "", f"> {config.site_description}", ""]
    group = None
    for page in _PAGES:
        path = Path(config.site_dir, page.file.src_uri)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page.markdown or "", encoding="utf-8")
        title = page.parent.title if page.parent else "Start"
        if title != group:
            lines += [*([""] if group else []), f"## {title}", ""]
            group = title
        lines.append(f"- [{page.title}]({page.file.src_uri})")
    Path(config.site_dir, "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _removed_names() -> str:
    """Return a table of the names that were removed or renamed."""
    from hf_vit.files.removed_names import REMOVED_NAMES

    rows = [f"| `{name}` | {replacement} |" for name, replacement in REMOVED_NAMES.items()]
    return "\n".join(["| name | instead |", "| --- | --- |", *rows])


TABLES = {
    "recipes": _recipes,
    "launch_templates": _launch_templates,
    "packages": _packages,
    "removed_names": _removed_names,
    "live_page": _live_page,
}
