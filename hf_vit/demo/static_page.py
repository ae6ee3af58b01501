"""The page that computes in the visitor's browser, as a static Space (`hf-vit demo --static FOLDER`)."""

from collections.abc import Sequence
from pathlib import Path

from ..conversion import export
from ..hub.static_space import write_space_readme
from ..loading import load


def write_static_page(model: str | Path, output: Path, runtime: Path | None = None, names: Sequence[str] = ()) -> None:
    """Write the page of a model.

    Args:
        model: a folder of save_pretrained, or a name on the Hub.
        output: a new folder.
        runtime: see `export_web`.
        names: names of the model on the Hub, which links the page from them.
    """
    loaded, processor = load(model, backend="eager")
    export(loaded, output, "web", processor=processor, runtime=runtime)
    write_space_readme(output, Path(model).resolve().name, names)
