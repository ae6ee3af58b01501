"""The page that computes in the visitor's browser, as a static Space (`hf-vit demo --static FOLDER`)."""

from collections.abc import Sequence
from pathlib import Path

from ..conversion import export
from ..files.output import new_folder, refuse_existing
from ..hub.static_space import write_space_readme
from ..loading import load


def write_static_page(
    model: str | Path,
    output: Path,
    runtime: Path | None = None,
    names: Sequence[str] = (),
    overwrite: bool = False,
) -> None:
    """Write the page of a model.

    Args:
        model: a folder of save_pretrained, or a name on the Hub.
        output: the folder; it appears when it is complete.
        runtime: see `export_web`.
        names: names of the model on the Hub, which links the page from them.
        overwrite: replace an existing folder.

    Raises:
        FileExistsError: `output` exists and may not be overwritten.
    """
    refuse_existing(output, overwrite)
    loaded, processor = load(model, backend="eager")
    with new_folder(output, overwrite) as draft:
        export(loaded, draft, "web", processor=processor, runtime=runtime, overwrite=True)
        write_space_readme(draft, Path(model).resolve().name, names)
