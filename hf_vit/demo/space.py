"""Files of a Space on the Hub that shows the page (`hf-vit demo --space FOLDER`)."""

import re
import shutil
from collections.abc import Sequence
from email.parser import Parser
from importlib.metadata import version
from pathlib import Path
from zipfile import BadZipFile, ZipFile

import yaml
from packaging.requirements import Requirement

from ..files.contents import PUSHED, matches
from ..files.output import new_folder

_APP = '''\
"""Page of `hf-vit demo`, as a Space on the Hub."""

{imports}
here = Path(__file__).parent
{install}
from hf_vit.demo.page import serve

serve([{models}], host=None)  # at the address GRADIO_SERVER_NAME
'''
_IMPORTS = """\
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
"""
_INSTALL = """\
if find_spec("hf_vit") is None:  # hf_vit is not on a package index yet; its wheel is beside this file
    wheel = here / {wheel!r}
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", wheel], check=True)
"""
_README = """\
---
{metadata}---

# {title}

The page of `hf-vit demo`: it classifies pictures and shows the model's attention.

Upload this folder to the Hub, under a name of your own; the Space is created, or replaced:

```bash
hf upload OWNER/NAME . --repo-type space
```

{wheel}
"""
_WITHOUT_WHEEL = """\
`requirements.txt` installs hf_vit from a package index. If hf_vit is not on the index yet, build its wheel with
`pip wheel --no-deps .` in a checkout of hf_vit, and write this folder again with
`--wheel hf_vit-{version}-py3-none-any.whl`, which copies the wheel beside `app.py`."""
_WITH_WHEEL = """\
`app.py` installs hf_vit from `{wheel}` in this folder, because a Space installs
`requirements.txt` before its other files exist."""


def write_space(folder: Path, models: Sequence[str], wheel: Path | None = None, overwrite: bool = False) -> None:
    """Write app.py, requirements.txt, README.md, local models, and a wheel.

    Args:
        folder: the folder; it appears when it is complete.
        models: models of the page: local folders, which are copied, or names on the Hub.
        wheel: wheel of hf_vit, if hf_vit is not on a package index.
        overwrite: replace an existing folder.

    Raises:
        FileExistsError: the folder exists and may not be overwritten.
        ValueError: the wheel is not one of hf_vit.
    """
    needed = [f"hf_vit[demo]=={version('hf_vit')}"] if wheel is None else _requirements_of(wheel)
    with new_folder(folder, overwrite) as draft:
        shown = [_copy_model(Path(model), draft) if Path(model).is_dir() else model for model in models]
        if wheel is not None:
            shutil.copyfile(wheel, draft / wheel.name)
        (draft / "app.py").write_text(_render_app(shown, wheel), encoding="utf-8")
        (draft / "requirements.txt").write_text("".join(f"{line}\n" for line in needed), encoding="utf-8")
        (draft / "README.md").write_text(_render_readme(shown, wheel), encoding="utf-8")


def _copy_model(model: Path, space: Path) -> str:
    """Copy a model's files to the Space; return their folder there."""
    name = model.resolve().name
    while (space / "models" / name).exists():
        name += "_"
    (space / "models" / name).mkdir(parents=True)
    for file in model.iterdir():
        if file.is_file() and matches(file.name, PUSHED):
            shutil.copyfile(file, space / "models" / name / file.name)
    return f"models/{name}"


def _render_app(models: list[str], wheel: Path | None) -> str:
    shown = ", ".join(f"here / {model!r}" if model.startswith("models/") else repr(model) for model in models)
    if wheel is None:
        return _APP.format(imports="from pathlib import Path\n", install="", models=shown)
    return _APP.format(imports=_IMPORTS, install=_INSTALL.format(wheel=wheel.name), models=shown)


def _render_readme(models: list[str], wheel: Path | None) -> str:
    title = " and ".join(model.rpartition("/")[2] for model in models)
    on_hub = [model for model in models if not model.startswith("models/")]
    metadata = {
        "title": title,
        "sdk": "gradio",
        "sdk_version": version("gradio"),
        "app_file": "app.py",
        "pinned": False,
        **({"models": on_hub} if on_hub else {}),
    }
    about = _WITHOUT_WHEEL.format(version=version("hf_vit")) if wheel is None else _WITH_WHEEL.format(wheel=wheel.name)
    return _README.format(metadata=yaml.safe_dump(metadata, sort_keys=False), title=title, wheel=about)


def _requirements_of(wheel: Path) -> list[str]:
    """Requirements of a wheel of hf_vit with its extra `demo`, without hf_vit itself."""
    try:
        with ZipFile(wheel) as archive:
            name = next(name for name in archive.namelist() if re.fullmatch(r"hf_vit-[^/]*\.dist-info/METADATA", name))
            lines = Parser().parsestr(archive.read(name).decode()).get_all("Requires-Dist", [])
    except (BadZipFile, StopIteration) as error:
        raise ValueError(f"{wheel} is not a wheel of hf_vit") from error
    found, extras = dict[str, Requirement](), ["", "demo"]
    for extra in extras:  # the list grows, because an extra can name others
        for requirement in map(Requirement, lines):
            marker = requirement.marker
            if marker is not None and (not marker.evaluate({"extra": extra}) or marker.evaluate({"extra": ""})):
                continue
            if requirement.name == "hf_vit":
                extras += sorted(requirement.extras - set(extras))
            elif marker is not None or not extra:
                requirement.marker = None
                found.setdefault(requirement.name, requirement).specifier &= requirement.specifier
    return [str(requirement) for requirement in found.values()]
