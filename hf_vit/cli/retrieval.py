"""`hf-vit embed` and `hf-vit search`, with the files of features that they exchange."""

import hashlib
import json
import json as json_format
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Annotated, Any
from zipfile import BadZipFile

import numpy as np

from ..files.messages import silence_progress_bars
from ..files.output import new_file, refuse_existing
from ..files.predictions import Table
from .arguments import Count, Model, Overwrite
from .image_list import (
    Backend,
    BatchProgress,
    BatchSize,
    Dataset,
    Device,
    ImageColumn,
    Images,
    Split,
    find_images,
    load_on,
    read_named,
)

SUFFIXES = (".parquet", ".npz", ".csv")
_KEY = b"hf_vit"  # key in the metadata of a parquet file
_ROWS = 8192  # rows of a row group, and of a chunk that is read
Batches = Iterable[tuple[list[str], np.ndarray]]  # names of images, and their features (images, features)
_PICTURES = (".png", ".jpg", ".pdf", ".svg")
_PROCESSOR = "preprocessor_config.json"
_ROWS_PER_GROUP = 4  # rows to search for per group of near duplicates


def write_features(path: Path, about: dict[str, Any], batches: Batches, overwrite: bool) -> tuple[int, int]:
    """Write batches of names and features to a file, which appears only when it is complete.

    Args:
        path: file to write; the suffix sets its format, one of `SUFFIXES`.
        about: name and fingerprint of the model; a .csv does not store it.
        batches: the batches, at least one.
        overwrite: replace an existing file.

    Returns:
        The number of images, and of features of each.
    """
    write = {".parquet": _write_parquet, ".npz": _write_npz, ".csv": _write_csv}[path.suffix.lower()]
    with new_file(path, overwrite) as draft:
        return write(draft, about, batches)


def _write_parquet(path: Path, about: dict[str, Any], batches: Batches) -> tuple[int, int]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    writer, count, width = None, 0, 0
    with ExitStack() as opened:
        for names, features in _row_groups(batches):
            count, width = count + len(names), features.shape[1]
            types = {"file": pa.string(), "features": pa.list_(pa.float32(), width)}
            schema = pa.schema(types, {_KEY: json.dumps(about)})
            writer = writer or opened.enter_context(pq.ParquetWriter(path, schema))
            # bytes of a name that are not UTF-8 are written as \udcNN
            files = [name.encode(errors="backslashreplace").decode() for name in names]
            rows = pa.FixedSizeListArray.from_arrays(pa.array(features.reshape(-1), pa.float32()), width)
            writer.write_table(pa.table([files, rows], schema=schema))
    return count, width


def _row_groups(batches: Batches) -> Iterator[tuple[list[str], np.ndarray]]:
    """Join batches to at least 8192 images each, except the last."""
    names, features = [], []
    for its_names, its_features in batches:
        names += its_names
        features.append(its_features)
        if len(names) >= _ROWS:
            yield names, np.concatenate(features)
            names, features = [], []
    if names:
        yield names, np.concatenate(features)


def _write_npz(path: Path, about: dict[str, Any], batches: Batches) -> tuple[int, int]:
    names, parts = zip(*batches, strict=True)
    features = np.concatenate(parts)
    with open(path, "wb") as file:
        np.savez(file, files=np.concatenate(names), about=np.array(json.dumps(about)), features=features)
    return features.shape


def _write_csv(path: Path, about: dict[str, Any], batches: Batches) -> tuple[int, int]:
    table, count, width = None, 0, 0
    with open(path, "w", encoding="utf-8", errors="backslashreplace", newline="") as file:
        for names, features in batches:
            count, width = count + len(names), features.shape[1]
            table = table or Table(file, ["file", *(f"feature_{number}" for number in range(width))])
            table.extend([name, *row] for name, row in zip(names, features.tolist(), strict=True))
    return count, width


class Features:
    """Reader of a file of `write_features`: name and fingerprint of the model (`about`), image `names` and `chunks`.

    Raises:
        ValueError: it is not such a file.
        FileNotFoundError: the file does not exist.
    """

    def __init__(self, path: Path):
        self._path = path
        self._is_parquet = path.suffix.lower() == ".parquet"
        if not self._is_parquet and path.suffix.lower() != ".npz":
            raise ValueError(f"cannot search {path}: expected features in a .parquet or .npz file of `hf-vit embed`")
        if not path.is_file():
            raise FileNotFoundError(f"no such file: {path}")
        try:
            about, self.names = self._open()
            self.about = {key: str(about[key]) for key in ("model", "sha256")}
        except (ValueError, KeyError, OSError, TypeError, BadZipFile) as error:
            raise ValueError(f"cannot read {path}: it is not a feature file that `hf-vit embed` wrote") from error

    def _open(self) -> tuple[dict[str, Any], list[str]]:
        if self._is_parquet:
            import pyarrow.parquet as pq

            with pq.ParquetFile(self._path) as file:
                about = json.loads(file.schema_arrow.metadata[_KEY])
                return about, file.read(columns=["file"])["file"].to_pylist()
        with (
            open(self._path, "rb") as file,
            np.load(file, allow_pickle=False) as arrays,
        ):  # on an error np.load may leave it open
            return json.loads(str(arrays["about"])), arrays["files"].tolist()

    def chunks(self) -> Iterator[np.ndarray]:
        """Yield arrays (images, features) of float32, at most 8192 images each; a .npz is read as a whole."""
        if not self._is_parquet:
            with np.load(self._path, allow_pickle=False) as arrays:
                features = arrays["features"]
            yield from (features[start : start + _ROWS] for start in range(0, len(features), _ROWS))
            return
        import pyarrow.parquet as pq

        with pq.ParquetFile(self._path) as file:
            for batch in file.iter_batches(_ROWS, columns=["features"]):
                yield batch["features"].flatten().to_numpy().reshape(len(batch), -1)


def embed(
    folder: Model,
    images: Images = (),  # pyright: ignore[reportArgumentType]
    *,
    dataset: Dataset = None,
    split: Split = None,
    image_column: ImageColumn = None,
    batch_size: BatchSize = 8,
    device: Device = "auto",
    backend: Backend = None,
    output: Annotated[
        Path, "file to write: .npz or .parquet (needs hf_vit[training]) for `hf-vit search`, or .csv", "FILE"
    ],
    normalize: Annotated[bool, "scale the features of each image to L2 norm 1"] = False,
    overwrite: Overwrite = False,
) -> None:
    """Write the features of images (the input of the classifier's head) to a file.

    An image that cannot be read is skipped, with a message on standard error; the exit status is then 1, or 2 if no
    image can be read.
    """

    if (suffix := output.suffix.lower()) not in SUFFIXES:
        raise ValueError(f"--output is {output} (expected a name that ends in {', '.join(SUFFIXES)})")
    refuse_existing(output, overwrite)  # before the work, not after
    if suffix == ".parquet":
        import pyarrow.parquet  # noqa: F401
    found = find_images(images, dataset, split, image_column)
    silence_progress_bars()
    from ..loading import local_model
    from ..prediction import embed_batches

    folder = str(local_model(folder))
    model, processor = load_on(folder, device, backend, encoder_alone=True)
    about = _identify(folder) | {"features": "pooler_output", "normalized": normalize}
    batches = embed_batches(model, processor, found, batch_size, normalize=normalize, skip_unreadable=True)
    progress = BatchProgress("hf-vit embed", found)
    count, width = write_features(output, about, progress.follow(batches), overwrite)
    print(f"{count:,} images, {width} features each: {output}")
    if suffix != ".csv":
        print(f"next: hf-vit search {output} QUERY.jpg")
    progress.end()


def _identify(folder: str) -> dict[str, Any]:
    """Return the folder or name of a model, and one SHA-256 of its weights and its preprocessing."""
    from ..files.download import sha256_of
    from ..models.utils import find_file

    path = Path(folder) if Path(folder).is_dir() else Path(str(find_file(folder, "config.json", {}))).parent
    files = sorted(file for pattern in ("*.safetensors", "*.bin", _PROCESSOR) for file in path.glob(pattern))
    digest = hashlib.sha256("".join(f"{sha256_of(file)}  {file.name}\n" for file in files).encode())
    return {"model": str(path.resolve()) if path == Path(folder) else folder, "sha256": digest.hexdigest()}


def search(
    features: Annotated[Path, ".parquet or .npz file that `hf-vit embed` wrote"],
    queries: Annotated[
        list[str], "query images: files, folders (with subfolders, sorted), quoted globs, or https:// URLs"
    ],
    *,
    top_k: Annotated[Count, "number of images to find for each query"] = 5,
    group: Annotated[
        bool, "group each result with its near-duplicates (re-encoded, resized, mirrored or cropped)"
    ] = False,
    model: Annotated[
        str | None,
        "model that computed the features; needed only if its folder has moved since `hf-vit embed`",
        "FOLDER",
    ] = None,
    device: Device = "auto",
    json: Annotated[bool, "print one JSON object per result"] = False,
    sheet: Annotated[
        Path | None, "picture to write with one query and its results: .png, .jpg, .pdf or .svg", "FILE"
    ] = None,
    overwrite: Annotated[bool, "replace the sheet"] = False,
) -> None:
    """Find the images most similar to each query image.

    A query that cannot be read is skipped, with a message on standard error; the exit status is then 1, or 2 if no
    query can be read.
    """
    import numpy as np

    found = find_images(queries)
    if sheet:
        if len(found) > 1:
            raise ValueError(f"--sheet draws only one query, but {len(found)} are given")
        if sheet.suffix.lower() not in _PICTURES:
            raise ValueError(f"--sheet is {sheet} (expected a name that ends in {', '.join(_PICTURES)})")
        refuse_existing(sheet, overwrite)
        import matplotlib  # noqa: F401
    stored = Features(features)
    silence_progress_bars()
    from .. import prediction

    folder = model or stored.about["model"]
    if Path(folder).is_absolute() and not Path(folder).is_dir():
        raise ValueError(f"cannot find {folder}, the model that computed the features; give its folder with --model")
    encoder, processor = load_on(folder, device)
    fingerprint = _identify(folder)
    if stored.about["sha256"] != fingerprint["sha256"]:
        raise ValueError(
            f"{features} was computed by another model, {stored.about['model']} (sha256 "
            f"{stored.about['sha256'][:8]}, not {fingerprint['sha256'][:8]}); run hf-vit embed again, or give that "
            "model's folder with --model"
        )
    progress, names, vectors = BatchProgress("hf-vit search", found), [], []
    batches = prediction.embed_batches(encoder, processor, found, skip_unreadable=True)
    for read, outputs in progress.follow(batches):
        names += read
        vectors.append(outputs)
    count = top_k * _ROWS_PER_GROUP if group else top_k
    rows, cosines = prediction.search(stored.chunks(), np.concatenate(vectors), count)
    same = _find_duplicates(stored, np.unique(rows).tolist()) if group else {}
    for query, its_rows, its_cosines in zip(names, rows.tolist(), cosines.tolist(), strict=True):
        results = _join_duplicates(its_rows, its_cosines, same)[:top_k]
        if len(found) > 1 and not json:
            print(query)
        for (row, *others), cosine in results:
            name, duplicates = stored.names[row], [stored.names[other] for other in others]
            if json:
                about = {"query": query} if len(found) > 1 else {}
                about |= {"image": name, "similarity": cosine} | ({"duplicates": duplicates} if group else {})
                print(json_format.dumps(about))
            else:
                print("\n".join([f"{cosine:7.4f}  {name}", *(f"         = {other}" for other in duplicates)]))
        if sheet:
            from ..demo.contact_sheet import draw_neighbors

            shown = [(stored.names[first], cosine) for (first, *_), cosine in results]
            draw_neighbors(query, [(read_named(name), name, cosine) for name, cosine in shown], sheet)
    progress.end()


def _find_duplicates(stored: Any, rows: list[int]) -> dict[int, set[int]]:
    """Return the near duplicates of each row; rows whose images can no longer be read have none."""
    import numpy as np
    import torch
    from PIL import Image

    from ..auditing.duplicates import SIDE, find_near_duplicates
    from ..models.image_reading import ImageReadingError, read_for_display

    pictures: dict[int, Any] = {}
    for row in rows:
        with suppress(ImageReadingError, OSError):
            picture = read_for_display(read_named(stored.names[row]), 4 * SIDE).convert("L")
            pictures[row] = np.asarray(picture.resize((SIDE, SIDE), Image.Resampling.BILINEAR))
    known, vectors, start = np.array(list(pictures), np.int64), [], 0
    if len(known) < 2:
        return {}
    for chunk in stored.chunks():
        vectors.append(chunk[known[(known >= start) & (known < start + len(chunk))] - start])
        start += len(chunk)
    features, levels = torch.from_numpy(np.concatenate(vectors)), torch.from_numpy(np.stack([*pictures.values()]))
    same: dict[int, set[int]] = {}
    for first, second in known[np.array([*find_near_duplicates(features, levels)], int).reshape(-1, 2)].tolist():
        same.setdefault(first, set()).add(second)
        same.setdefault(second, set()).add(first)
    return same


def _join_duplicates(rows: list[int], cosines: list[float], same: dict[int, set[int]]) -> list[tuple[list[int], float]]:
    """Group the results of a query by near duplicates; return (rows, highest cosine), the most similar group first."""
    groups: list[tuple[list[int], float]] = []
    for row, cosine in zip(rows, cosines, strict=True):
        joined = next((group for group, _ in groups if same.get(row, set()) & set(group)), None)
        if joined is None:
            groups.append(([row], cosine))
        else:
            joined.append(row)
    return groups
