"""The README.md of a folder: our part of it, and the version that a new folder gets.

The text between the two marks is ours and is replaced. The text around it is the user's own and is kept.
"""

from pathlib import Path

BEGIN = "<!-- hf_vit: from here on rendered by `hf-vit card`; write above or below, it stays -->"
END = "<!-- hf_vit: end -->"
_OURS = """\
This folder holds a model of `hf_vit`. Run `import hf_vit` before you load it: otherwise transformers reports that the
type `{model_type}` is unknown and that the checkpoint or transformers is out of date.

```python
import hf_vit
from transformers import AutoImageProcessor, {auto_class}

model = {auto_class}.from_pretrained("FOLDER")  # this folder
processor = AutoImageProcessor.from_pretrained("FOLDER")
```

`model, processor = hf_vit.load("FOLDER")` loads both. `hf-vit push FOLDER NAME --code` pushes the model with its code,
so that it also loads without hf_vit, with `trust_remote_code=True`. `hf-vit card FOLDER --write` replaces this text
with a model card.
"""
_TRANSFORMERS = """\
This folder holds a model of transformers' own classes (`{model_type}`), which hf_vit wrote.

```python
from transformers import AutoImageProcessor, {auto_class}

model = {auto_class}.from_pretrained("FOLDER")  # this folder
processor = AutoImageProcessor.from_pretrained("FOLDER")
```

`model, processor = hf_vit.load("FOLDER")` returns the same model with the exact preprocessing. `hf-vit card FOLDER
--write` replaces this text with a model card.
"""
_ADAPTER = """\
This folder holds a PEFT adapter for a model of `hf_vit`, without its weights; `adapter_config.json` names that model.

```python
import hf_vit

model, processor = hf_vit.load("FOLDER")  # this folder: the model with the adapter merged
```
"""


def write_readme(folder: Path, model_type: str, class_name: str) -> None:
    """Write a README.md that explains how to load the model in its folder.

    Args:
        model_type: `model_type` of the configuration.
        class_name: name of the model's class.
    """
    auto_class = "AutoModelForImageClassification" if class_name.endswith("ForImageClassification") else "AutoModel"
    text = _OURS if model_type.startswith("hf_") else _TRANSFORMERS
    _write(folder, text.format(model_type=model_type, auto_class=auto_class))


def write_adapter_readme(folder: Path) -> None:
    """Write a README.md that explains how to load a PEFT adapter."""
    _write(folder, _ADAPTER)


def _write(folder: Path, text: str) -> None:
    (folder / "README.md").write_bytes(f"{BEGIN}\n{text}{END}\n".encode())


def is_own_readme(file: Path) -> bool:
    """Return whether a file is a README.md that holds our part only: no front matter, no text above or below."""
    if file.name != "README.md" or file.is_symlink():
        return False
    text = file.read_text(encoding="utf-8", errors="replace").strip()
    return text.startswith(BEGIN) and text.endswith(END) and text.count(END) == 1
