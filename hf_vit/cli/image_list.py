"""Images on a command line: files, folders, globs, URLs, parquet files and datasets."""

import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from glob import glob
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from ..files.image_files import images_below
from ..files.messages import format_error, silence_progress_bars
from .arguments import Count

_URLS = ("https://", "http://")  # http:// is refused when the image is read
_ROW = re.compile(r"(.+?):(\w+(?:\[[^]]*\])?):(\d+)")  # name:split:row

# Arguments of `predict` and `embed`
Images = Annotated[
    list[str],
    "images: files, folders (with subfolders, sorted), quoted globs, https:// URLs, or parquet files with an image "
    "column",
]
Dataset = Annotated[str | None, "dataset: a name on the Hub, or a folder", "NAME"]
Split = Annotated[str | None, "split of --dataset, such as test or train[:10%] (default: the only one)"]
ImageColumn = Annotated[str | None, "image column of --dataset or parquet files (default: the only one)", "NAME"]
BatchSize = Annotated[Count, "maximum number of images per forward"]
Device = Annotated[str, "device: cpu, cuda, cuda:1, mps, ... (default auto: the accelerator if there is one, else cpu)"]
Backend = Annotated[
    Literal["auto", "eager", "torch", "openvino", "onnxruntime", "int8"] | None,
    "backend: eager (PyTorch), torch (optimized PyTorch), openvino, onnxruntime, int8 (the program that `hf-vit "
    "quantize` wrote), or auto (the fastest of torch, openvino and onnxruntime that is installed) (default: int8 if "
    "`hf-vit quantize` wrote the folder, else eager)",
]


class _Entry(NamedTuple):
    name: str
    rows: Any = None  # the dataset, for an image in a dataset
    number: int = 0  # row in the dataset


class ImageList(Sequence[Any]):
    """Inputs of an image processor; rows of a dataset are read on access."""

    def __init__(self, entries: list[_Entry]):
        self._entries = entries
        self.names = [entry.name for entry in entries]

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, index):
        name, rows, number = self._entries[index]
        if rows is None:
            return name
        (image,) = rows[number].values()
        image = image or {"bytes": b"", "path": None}  # a row may have no image
        if image["bytes"] is None and image["path"] is not None:
            return image["path"]
        return {"bytes": image["bytes"] or b"", "path": name}


def find_images(
    arguments: Sequence[str], dataset: str | None = None, split: str | None = None, column: str | None = None
) -> ImageList:
    """Return all images of the arguments, in their order, with the dataset last.

    Raises:
        FileNotFoundError: files do not exist; the message lists them.
        ValueError: a folder has no images, or there is no such split or column.
        ImportError: a dataset or parquet file needs an extra.
    """
    entries: list[_Entry] = []
    missing: list[str] = []
    for argument in arguments:
        if argument.startswith(_URLS):
            entries.append(_Entry(argument))
            continue
        paths = _paths_at(argument)
        if not paths:
            missing.append(argument)
        found = {}
        for path in paths:
            for entry in _entries_at(path, column):
                found[entry.name] = entry  # `**` matches both a folder and its files
        entries += found.values()
    if missing:
        raise FileNotFoundError(f"no such file: {', '.join(missing)}")
    if dataset:
        entries += _rows_of(dataset, split, column)
    if not entries:
        raise ValueError("there are no images; give files, folders or URLs, or a dataset with --dataset")
    if (split and not dataset) or (column and all(entry.rows is None for entry in entries)):
        raise ValueError("--split needs --dataset, and --image-column needs --dataset or a .parquet file")
    return ImageList(entries)


def _paths_at(argument: str) -> list[Path]:
    """Return the path of an argument, or those that match it as a pattern."""
    path = os.path.expanduser(argument)
    if os.path.exists(path):
        return [Path(path)]
    return [Path(match) for match in sorted(glob(path, recursive=True))]


def _entries_at(path: Path, column: str | None) -> list[_Entry]:
    if path.suffix.lower() == ".parquet" and path.is_file():
        return _rows_of(str(path), None, column)
    if not path.is_dir():
        return [_Entry(str(path))]
    return [_Entry(str(file)) for file in images_below(path)]


def _rows_of(name: str, split: str | None, column: str | None) -> list[_Entry]:
    """Rows of one split, called NAME:SPLIT:ROW; without `split`, of the only one."""
    from ..data.listing import open_rows

    rows, split = open_rows(name, split, column)
    return [_Entry(f"{name}:{split}:{number}", rows, number) for number in range(len(rows))]


def read_named(name: str) -> Any:
    """Return the input of an image processor for a name in `ImageList.names`: the name, or the image of a row."""
    found = None if name.startswith(_URLS) or Path(name).exists() else _ROW.fullmatch(name)
    if found is None:
        return name
    with suppress(ValueError, OSError, ImportError, IndexError):  # the dataset may have changed
        from ..data.listing import open_rows

        return ImageList([_Entry(name, open_rows(found[1], found[2], None)[0], int(found[3]))])[0]
    return name


class BatchProgress:
    """Progress bar over batches of images, with a message for each image that cannot be read.

    Args:
        program: name of the program, at the start of messages.
        images: the images of the batches.
    """

    def __init__(self, program: str, images: ImageList):
        self._program, self._images, self._skipped = program, images, 0

    def follow(self, batches: Any) -> Iterator[tuple[list[str], Any]]:
        """Yield (names of images, their outputs) of each batch.

        Raises:
            ValueError: no image can be read.
        """
        with _open_bar(len(self._images)) as bar:
            for batch in batches:
                self._skipped += len(batch.unreadable)
                for error in batch.unreadable.values():
                    if len(self._images) == 1:
                        raise error
                    write = print if bar is None else bar.write
                    write(f"{self._program}: {format_error(error)}", file=sys.stderr)
                if batch.numbers:
                    with nullcontext() if bar is None else bar.external_write_mode():
                        yield [self._images.names[number] for number in batch.numbers], batch.outputs
                if bar is not None:
                    bar.update(len(batch.numbers) + len(batch.unreadable))
        if self._skipped == len(self._images):
            raise ValueError(f"none of the {self._skipped} images can be read")

    def end(self) -> None:
        """If images were skipped, print their number and exit with status 1."""
        if self._skipped:
            print(f"{self._program}: {self._skipped} of {len(self._images)} images cannot be read", file=sys.stderr)
            raise SystemExit(1)


def _open_bar(total: int) -> Any:
    """Return a progress bar as a context manager; of None where nobody sees it, so that tqdm is not imported."""
    if sys.stderr is None or not sys.stderr.isatty() or find_spec("tqdm") is None:
        return nullcontext()
    from tqdm import tqdm

    return tqdm(total=total, unit=" images", delay=1)


def open_program(folder: str, num_images: int, output: str, **options: Any) -> Any:
    """Open a folder of `hf-vit export`, or the program that `hf-vit compile` made of a model, without torch.

    Args:
        output: the output that is needed, logits or pooler_output.
        options: options of the command that a program does not have, None where they are not given.

    Returns:
        A `Classifier`; its `about` is what identifies the model, of a compiled program. None for other models.

    Raises:
        ValueError: one of the options is given for an exported folder; or this is of an older format.
    """
    from ..runtimes.runner import Classifier, is_deployed

    given = [name for name, value in options.items() if value not in (None, "auto", "cpu")]
    if is_deployed(folder):
        if given:
            raise ValueError(f"{folder} is an exported program; --{given[0].replace('_', '-')} needs the model itself")
        return Classifier(folder, num_images)
    if given or options.get("backend") is not None or find_spec("huggingface_hub") is None:
        return None
    from ..runtimes.program_cache import find_compiled

    try:
        found = find_compiled(folder)
    except ValueError as error:
        print(error, file=sys.stderr)
        return None
    if found is None:
        return None
    compiled, record = found
    program = Classifier(compiled, num_images)
    if output not in program.outputs:
        return None
    program.about = record["about"]
    print(f"using the program of hf-vit compile {folder}; --backend eager uses PyTorch", file=sys.stderr)
    return program


def fetch(image: Any) -> Any:
    """Return an image; one that is given by its address is downloaded."""
    if not (isinstance(image, str) and image.startswith(_URLS)):
        return image
    from ..files.download import fetch_image  # imports huggingface_hub

    return fetch_image(image)


def load_on_device(
    folder: str, device: str, backend: str | None = None, batch_size: int = 1, features: bool = False, **options: Any
) -> tuple[Any, Any]:
    """Load a model on a device, and its image processor.

    Args:
        device: a device of torch, or "auto": the accelerator, or the CPU for a backend that runs only there.
        batch_size: usual number of images of a forward.
        features: compute only the encoder in the backend, without the head.
        options: more arguments of `hf_vit.load`.

    Raises:
        ValueError: there is no such device, or the backend does not support it.
    """
    silence_progress_bars()
    import torch

    from ..files.runs import best_checkpoint_dir
    from ..loading import load, use_backend

    best = best_checkpoint_dir(folder)
    if best is not None:
        print(f"{folder} has the weights of the last step; the best weights are in {best}", file=sys.stderr)
    needs_cpu = backend not in (None, "eager", "torch")
    if needs_cpu and device not in ("auto", "cpu"):
        raise ValueError(f"--backend {backend} runs only on the CPU, but --device is {device}; remove one of them")
    is_auto = device == "auto"
    if is_auto:
        device = "cpu" if needs_cpu else _default_device()
    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {device} is not available ({error}); `hf-vit env` lists the devices") from error
    model, processor = load(folder, backend=backend and "eager", **options)
    if device != "cpu" and not (is_auto and hasattr(model, "write_program")):  # an Int8Model stays on the CPU
        model.to(device)  # pyright: ignore[reportArgumentType] - a decorator of transformers hides its type
    if backend is None:
        return model, processor
    if features and backend != "int8":
        model = model.base_model
    return use_backend(model, backend, batch_size), processor


def _default_device() -> str:
    """Return the accelerator, of this process's rank under torchrun or accelerate launch; else the CPU."""
    import torch

    from ..data.devices import find_accelerator

    accelerator = find_accelerator()
    if accelerator is None:
        return "cpu"
    if "LOCAL_RANK" not in os.environ:
        return str(accelerator)
    return f"{accelerator.type}:{int(os.environ['LOCAL_RANK']) % torch.accelerator.device_count()}"
