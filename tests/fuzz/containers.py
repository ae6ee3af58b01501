"""Kinds of containers: flax msgpack, folders of arrays as JAX trainers write them, and other folders to convert."""

import re
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import msgpack
import numpy as np
from safetensors.torch import load_file
from transformers import ViTForImageClassification

from hf_vit import HfViTForImageClassification, HfViTImageProcessor
from hf_vit.conversion import convert, export
from hf_vit.files.output import MARK

from ..paths import MORE, PEERS
from ..tiny_models import save_tiny
from .checkpoints import Conversion, fingerprint, other_numbers
from .gate import Case
from .mutators import mutate_bytes, mutate_json, mutate_records, mutate_tree

Files = dict[str, bytes]
SQUARE = {"image_size": (24, 24), "patch_size": (4, 4), "hidden_act": "gelu", "position_interpolation": "bicubic"}
_ARRAY = 1  # flax's extension: a packed (shape, name of the dtype, bytes)


def files_below(folder: Path) -> Files:
    """The files of a folder and of those in it, by their paths below `input`."""
    found = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != MARK)
    return {f"input/{path.relative_to(folder).as_posix()}": path.read_bytes() for path in found}


class Msgpack(Conversion):
    """It has no checksums: the numbers must be those that msgpack's own reader finds."""

    name = "msgpack"
    file = "input.msgpack"
    folder = MORE
    arguments = {"container_big_vision.msgpack": {}, "container_big_vision_params.msgpack": {}, "chunked": {}}  # noqa: RUF012

    def content(self, name: str) -> bytes:
        if name != "chunked":
            return super().content(name)
        return _pack(_in_chunks(_unpack(super().content("container_big_vision.msgpack"))))

    def make(self, random: Random) -> Case:
        name = random.choice(list(self.originals))
        data = self.originals[name]
        if random.random() < 0.4:
            return self.case(name, mutate_bytes(data, random, list(self.originals.values())))
        return self.case(name, _pack(mutate_tree(_unpack(data), random)))

    def compare(self, case: Case, result: Any) -> str | None:
        record = result["record"]
        if record["other_parts"] or record["dropped"]:
            return None
        return other_numbers(result["arrays"], _arrays_in(_unpack(case.files[self.file])))


def _unpack(data: bytes) -> Any:
    """The tree; an array is a map of its number, shape, type and bytes."""

    def extension(number: int, content: bytes) -> Any:
        try:
            shape, dtype, array = msgpack.unpackb(content)
        except Exception:  # was mutated before
            return msgpack.ExtType(number, content)
        return {"extension": number, "shape": shape, "dtype": dtype, "data": array}

    return msgpack.unpackb(data, strict_map_key=False, ext_hook=extension)


def _pack(tree: Any) -> bytes:
    return bytes(msgpack.packb(_packable(tree)) or b"")


def _packable(value: Any) -> Any:
    """A value that msgpack can write: arrays as extensions, numbers within 64 bits, text that is UTF-8."""
    if isinstance(value, dict) and "extension" in value:
        number = value["extension"]
        parts = [_packable(part) for name, part in value.items() if name != "extension"]
        is_number = isinstance(number, int) and 0 <= number < 128
        return msgpack.ExtType(int(number) if is_number else 3, bytes(msgpack.packb(parts) or b""))
    if isinstance(value, dict):
        return {_packable(key): _packable(below) for key, below in value.items()}
    if isinstance(value, list | tuple):
        return [_packable(below) for below in value]
    if isinstance(value, int) and not isinstance(value, bool):
        return max(-(2**63), min(value, 2**64 - 1))
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value


def _in_chunks(tree: dict[str, Any]) -> dict[str, Any]:
    """A tree of which flax has cut up every matrix into three pieces, as it does with arrays beyond 1 GiB."""
    if "extension" not in tree:
        return {name: _in_chunks(value) if isinstance(value, dict) else value for name, value in tree.items()}
    pieces = np.array_split(np.frombuffer(tree["data"], tree["dtype"]), 3)
    chunks = {str(index): {**tree, "shape": piece.shape, "data": piece.tobytes()} for index, piece in enumerate(pieces)}
    sizes = {str(index): size for index, size in enumerate(tree["shape"])}
    return {"__msgpack_chunked_array__": True, "shape": sizes, "chunks": chunks}


def _arrays_in(tree: Any) -> Any:
    """The arrays of a tree as NumPy has them; the pieces of those that are cut up."""
    if isinstance(tree, dict) and tree.get("extension") == _ARRAY:
        yield np.frombuffer(tree["data"], "V2" if tree["dtype"] == "bfloat16" else tree["dtype"])
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from _arrays_in(value)


class FolderConversion(Conversion):
    """A folder with several files; `originals` has those of each by their paths."""

    file = "input"
    added: tuple[str, ...]  # names that a file may get
    checked = ""  # the pattern of names of files that have checksums

    def make(self, random: Random) -> Case:
        name = random.choice(list(self.originals))
        original = self.originals[name]
        foreign = random.choice(list(self.originals.values()))
        names = [f"input/{name}" for name in self.added]
        files = dict(mutate_records(list(original.items()), random, names, list(foreign.values()), _mutate_file))
        files = {name: data for name, data in files.items() if files.keys().isdisjoint(map(str, Path(name).parents))}
        changed = [name for name in original.keys() | files.keys() if original.get(name) != files.get(name)]
        is_checked = self.checked and all(
            re.fullmatch(self.checked, name) and name in files and files[name] not in original.values()
            for name in changed
        )
        return Case(name, files, self.arguments.get(name, {}), "same" if is_checked else "any")


def _mutate_file(content: bytes, random: Random) -> bytes:
    return (mutate_json if content.startswith(b"{") else mutate_bytes)(content, random)


class Arrays(FolderConversion):
    """Folders of Orbax and of big_vision's trainer, and the same arrays in zarr 2 and 3 without compression."""

    name = "arrays"
    arguments = {}  # noqa: RUF012
    added = (".zarray", "zarr.json", "manifest.ocdbt", "x/.zarray", "x/zarr.json", "_METADATA", "0", "0.0", "c/0")
    checked = r"input/(manifest\.ocdbt|_sharding)|.*/c/.*"

    def prepare(self, folder: Path) -> None:
        """Nothing in this process uses tensorstore, whose threads would not survive the fork."""
        convert(MORE / "container.npz", read_weights=False).save(folder / "whole")
        self.whole = [fingerprint(load_file(folder / "whole" / "model.safetensors"))]
        subprocess.run([sys.executable, "-c", _WRITE_ZARR, MORE / "container.npz", folder], check=True)
        self.originals = {
            "big_vision": files_below(MORE / "tensorstore_folder-000000010"),
            "orbax": files_below(MORE / "orbax_folder"),
            "orbax_train": files_below(MORE / "orbax_train_folder"),
            "zarr": files_below(folder / "zarr"),
            "zarr3": files_below(folder / "zarr3"),
        }


# Arrays in zarr 2, each in one chunk, and in zarr 3, in chunks of half their rows with checksums.
_WRITE_ZARR = """
import sys
import numpy as np, tensorstore

ENDIAN = {"name": "bytes", "configuration": {"endian": "little"}}
for name, array in np.load(sys.argv[1]).items():
    rows = max(1, len(array) // 2)
    chunks = {"name": "regular", "configuration": {"chunk_shape": [rows, *array.shape[1:]]}}
    for driver, metadata in (
        ("zarr", {"chunks": array.shape, "compressor": None}),
        ("zarr3", {"chunk_grid": chunks, "codecs": [ENDIAN, {"name": "crc32c"}]}),
    ):
        place = {"driver": "file", "path": f"{sys.argv[2]}/{driver}/{name.replace('/', '.')}"}
        spec = {"driver": driver, "kvstore": place, "metadata": metadata, "store_data_equal_to_fill_value": True}
        store = tensorstore.open(spec, create=True, dtype=array.dtype, shape=array.shape).result()
        store.write(array).result()
"""


class Folders(FolderConversion):
    """Folders that hold a checkpoint and what belongs to it: files that are missing, changed, in place of others."""

    name = "folder"
    arguments = {"timm": {"position_grid": (5, 9)}}  # noqa: RUF012
    added = (
        "config.json", "preprocessor_config.json", "conversion.json", "adapter_config.json", "generation_config.json",
        "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json",
        "flax_model.msgpack", "model.h5", "saved_model.pb", "x.npz", "x.pth", "x-LAST", "manifest.ocdbt", "_METADATA",
        "a/.zarray", "a/zarr.json",
    )  # fmt: skip

    def prepare(self, folder: Path) -> None:
        model = HfViTForImageClassification.from_pretrained(save_tiny(folder / "square", **SQUARE))
        export(model, folder / "written", "transformers", processor=HfViTImageProcessor("transformers", size=24))
        sharded = ViTForImageClassification.from_pretrained(folder / "written")
        sharded.save_pretrained(folder / "sharded", max_shard_size="9KB")
        run = files_below(MORE / "tensorstore_folder-000000010")
        run = {name.replace("input/", "input/run-000000010/"): content for name, content in run.items()}
        self.originals = {
            "timm": files_below(PEERS / "timm_folder"),
            "transformers": files_below(folder / "written"),
            "sharded": files_below(folder / "sharded"),
            "flax": files_below(MORE / "flax_folder"),
            "run": {**run, "input/run-LAST": b"000000010", "input/config.json": b'{"seed": 0}'},
        }
