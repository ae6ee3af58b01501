"""The README.md of a folder: our part of it, and the version that `convert` writes.

The text between the two marks is ours and is replaced. The text around it is the user's own and is kept.
"""

from pathlib import Path

BEGIN = "<!-- hf_vit: from here on rendered by `hf-vit card`; write above or below, it stays -->"
END = "<!-- hf_vit: end -->"
_TEXT = """\
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


def render_readme(model_type: str, class_name: str) -> str:
    """Render a README.md that explains how to load the model in its folder.

    Args:
        model_type: `model_type` of the configuration.
        class_name: name of the model's class.
    """
    auto_class = "AutoModelForImageClassification" if class_name.endswith("ForImageClassification") else "AutoModel"
    return f"{BEGIN}\n{_TEXT.format(model_type=model_type, auto_class=auto_class)}{END}\n"


def is_own_readme(file: Path) -> bool:
    """Return whether a file is a README.md that holds our part only: no front matter, no text above or below."""
    if file.name != "README.md" or file.is_symlink():
        return False
    text = file.read_text(encoding="utf-8", errors="replace").strip()
    return text.startswith(BEGIN) and text.endswith(END) and text.count(END) == 1
