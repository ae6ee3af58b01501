"""What the site has beside the files of this folder: pages from elsewhere, tables from data, links between both.

A page is written to be read in the repository too, so its links are those between files; here they become links of the
site. A marker such as `<!-- table: recipes -->` is replaced by a table that is made from its source.
"""

import ast
import posixpath
import re
from importlib import import_module
from itertools import takewhile
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
# Page of the site: file of the repository, where that is not a file of docs/ with the same name.
ELSEWHERE = {
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    **{path: path for path in sorted(f"benchmarks/{page.name}" for page in (ROOT / "benchmarks").glob("*.md"))},
}
# Page of the reference: module whose public names it has, and what the page is about.
REFERENCE = {
    "hf_vit": "Models, images, loading and the Hub",
    "hf_vit.conversion": "Checkpoints of others, and programs",
    "hf_vit.analysis": "Looking inside",
    "hf_vit.catalog": "Released checkpoints",
}
_LINK = re.compile(r"(?P<before>!?\[(?P<text>[^\]]*)\]\()(?P<target>[^)\s#:]+)(?P<anchor>#[^)\s]*)?\)")
_MARKER = re.compile(r"<!-- table: (\w+) -->")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not files of this folder."""
    for page, path in ELSEWHERE.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / path)))
    files.append(File.generated(config, "reference/index.md", content=_reference_index()))
    for module in REFERENCE:
        files.append(File.generated(config, _reference_page(module), content=_reference_of(module)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Fill in the tables and turn links between files into links of the site."""
    source = page.file.src_uri
    markdown = _MARKER.sub(lambda found: TABLES[found[1]](), markdown)
    return _LINK.sub(lambda found: _site_link(found, source, files), markdown)


def _site_link(found: re.Match, source: str, files: Files) -> str:
    """The same link on the site; the text alone where it leads to a file that the site does not have."""
    path = ELSEWHERE.get(source, f"docs/{source}")
    target = posixpath.normpath(posixpath.join(posixpath.dirname(path), found["target"]))
    pages = {path: page for page, path in ELSEWHERE.items()} | {"README.md": "index.md"}
    page = pages.get(target, target.removeprefix("docs/") if target.startswith("docs/") else None)
    if page is None:
        if not (ROOT / target).exists():
            raise ValueError(f"{path} links to {target}, which is not in the repository")
        return found["text"]
    relative = posixpath.relpath(page, posixpath.dirname(source) or ".")
    return f"{found['before']}{relative}{found['anchor'] or ''})"


def _reference_page(module: str) -> str:
    return f"reference/{module.removeprefix('hf_vit.')}.md"


def _public_names(module: str) -> list[str]:
    """The functions and classes that a module exports."""
    loaded = import_module(module)
    return [name for name in loaded.__all__ if callable(getattr(loaded, name))]


def _first_line(module: str, name: str) -> str:
    documented = getattr(import_module(module), name).__doc__ or ""
    return documented.strip().partition("\n\n")[0].replace("\n", " ").replace("|", "\\|")


def _reference_index() -> str:
    lines = ["# Reference", "", "Every public name, from the code. A leading underscore is private everywhere.", ""]
    for module, title in REFERENCE.items():
        page = posixpath.basename(_reference_page(module))
        lines += [f"## {title}", "", f"`{module}`", "", "| name | |", "| --- | --- |"]
        lines += [
            f"| [`{name}`]({page}#{module}.{name}) | {_first_line(module, name)} |" for name in _public_names(module)
        ]
        lines.append("")
    return "\n".join(lines)


def _reference_of(module: str) -> str:
    lines = [f"# {REFERENCE[module]}", "", f"`{module}`", ""]
    lines += [f"::: {module}.{name}\n" for name in _public_names(module)]
    return "\n".join(lines)


def _recipes() -> str:
    """Every recipe, as its file says."""
    from hf_vit.training.recipes import about_recipe, installed_recipes

    rows = ["| recipe | what it is | needs | reaches |", "| --- | --- | --- | --- |"]
    for name, path in installed_recipes().items():
        about = about_recipe(path)
        rows.append(f"| `{name}` | {about.what} | {about.hardware} | {about.expected} |")
    return "\n".join(rows)


def _launch_templates() -> str:
    """Every launch template, as the comments at its beginning say."""
    rows = ["| template | what it is |", "| --- | --- |"]
    for path in sorted((ROOT / "training" / "accelerate").glob("*.yaml")):
        comments = takewhile(lambda line: line.startswith("#"), path.read_text(encoding="utf-8").splitlines())
        rows.append(f"| `{path.stem}` | {' '.join(line.removeprefix('#').strip() for line in comments)} |")
    return "\n".join(rows)


def _packages() -> str:
    """Every package, as its docstring says."""
    rows = ["| package | what it does |", "| --- | --- |"]
    for path in sorted((ROOT / "hf_vit").glob("*/__init__.py")):
        if documented := ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))):
            first = documented.partition("\n\n")[0].replace("\n", " ")
            rows.append(f"| `hf_vit.{path.parent.name}` | {first} |")
    return "\n".join(rows)


TABLES = {"recipes": _recipes, "launch_templates": _launch_templates, "packages": _packages}
