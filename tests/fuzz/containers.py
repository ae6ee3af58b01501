"""Kinds of containers: flax msgpack, folders of arrays as JAX trainers write them, and other folders to convert."""

import json
import math
from pathlib import Path
from random import Random
from typing import Any

import msgpack
import numpy as np
from safetensors.torch import load_file

from hf_vit import HfViTForImageClassification, HfViTImageProcessor
from hf_vit.conversion import convert_to_folder, export
from hf_vit.files.contents import MARK

from ..paths import MORE, PEERS
from ..tiny_models import save_tiny
from .checkpoints import Conversion, fingerprint, floats, same_numbers
from .gate import Case
from .mutators import mutate_bytes, mutate_tree, odd_value, write_json

Files = dict[str, bytes]
_ARRAY = 1  # flax's extension: a packed (shape, name of the dtype, bytes)
_DTYPES = (
    "float16",
    "bfloat16",
    "float64",
    "int8",
    "bool",
    "complex64",
    "object",
    "O",
    "<f4",
    "float32,float32",
    "V2",
    "",
)


def files_below(folder: Path) -> Files:
    """The files of a folder and of those in it, by their paths below `input`."""
    found = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != MARK)
    return {f"input/{path.relative_to(folder).as_posix()}": path.read_bytes() for path in found}


def _odd_shape(shape: Any, random: Random) -> Any:
    """Sizes that an array of this shape does not have, or that no array has."""
    shape = list(shape)
    return random.choice((
        shape[::-1], [math.prod(shape)], [*shape, 1], [1, *shape], shape[:-1], [], [0], [0, *shape], [-1, *shape],
        [-size for size in shape], [size + 1 for size in shape], [size * 2**20 for size in shape], [2**31], [2**63],
        [2**40, 2**40], [2**62] * 4, [2**20] * 3, [1] * 40, [1.5], ["7"], [None], [[7]], [True], "x", None, {"0": 7},
    ))  # fmt: skip


class Msgpack(Conversion):
    """It has no checksums: the numbers must be those that msgpack's own reader finds."""

    name = "msgpack"
    suffix = ".msgpack"
    arguments = {"container_big_vision.msgpack": {}, "container_big_vision_params.msgpack": {}, "chunked": {}}  # noqa: RUF012

    def content(self, name: str) -> bytes:
        if name != "chunked":
            return (MORE / name).read_bytes()
        return _pack(_in_chunks(_unpack((MORE / "container_big_vision.msgpack").read_bytes())))

    def make(self, random: Random) -> Case:
        name = random.choice(list(self.originals))
        data = self.originals[name]
        if random.random() < 0.4:
            return self.case(name, *mutate_bytes(data, random, list(self.originals.values())))
        tree, how = _mutate_arrays(_unpack(data), random)
        return self.case(name, _pack(tree), how)

    def compare(self, case: Case, result: Any) -> str | None:
        record = result["record"]
        if record["beside"] or record["left_out"]:
            return None
        theirs = [floats(array) for array in _arrays_in(_unpack(case.files[self.file]))]
        ours = [tensor.numpy().ravel() for tensor in result["arrays"].values()]
        return None if same_numbers(ours, theirs) else "msgpack reads other numbers in the file"


def _unpack(data: bytes) -> Any:
    """The tree; an array is its extension, (number, bytes)."""
    return msgpack.unpackb(data, strict_map_key=False)


def _pack(tree: Any) -> bytes:
    return bytes(msgpack.packb(tree) or b"")


def _in_chunks(tree: dict[str, Any]) -> dict[str, Any]:
    """A tree of which flax has cut up every matrix into three pieces, as it does with arrays beyond 1 GiB."""
    cut = {}
    for name, value in tree.items():
        cut[name] = _in_chunks(value) if isinstance(value, dict) else value
        if isinstance(value, msgpack.ExtType):
            shape, dtype, data = msgpack.unpackb(value.data)
            pieces = np.array_split(np.frombuffer(data, dtype), 3)
            chunks = {str(index): _extension(piece.shape, dtype, piece.tobytes()) for index, piece in enumerate(pieces)}
            sizes = {str(index): size for index, size in enumerate(shape)}
            cut[name] = {"__msgpack_chunked_array__": True, "shape": sizes, "chunks": chunks}
    return cut


def _extension(shape: Any, dtype: Any, data: Any) -> msgpack.ExtType:
    return msgpack.ExtType(_ARRAY, msgpack.packb((shape, dtype, data), strict_types=False))


def _mutate_arrays(tree: dict[str, Any], random: Random) -> tuple[Any, str]:
    """The tree with one to three odd entries: arrays, names, chunks, or values where a map or an array is expected."""
    steps = []
    for _ in range(random.choice((1, 1, 2, 3))):
        places = list(_leaves(tree))
        container, key = random.choice(places)
        step = random.choice(("array", "array", "array", "kind", "value", "name", "remove", "deep", "copy", "two"))
        value = container[key]
        steps.append(f"{step} {str(key)[:40]!r}")
        if step == "array" and isinstance(value, msgpack.ExtType) and value.code == _ARRAY:
            container[key] = _odd_array(value, random)
        elif step == "kind" and isinstance(value, msgpack.ExtType):
            container[key] = msgpack.ExtType(random.choice((0, 2, 3, 127)), value.data)
        elif step == "name":
            container[random.choice((f"{key}s", "", "a/b", "x" * 5_000, 3, None, b"x", "\u202e", "params"))] = (
                container.pop(key)
            )
        elif step == "remove":
            del container[key]
        elif step == "deep":
            for _ in range(random.choice((1, 30, 400))):
                value = {"a": value}
            container[key] = value
        elif step == "copy":
            other, name = random.choice(places)
            container[key] = other.get(name)
        elif step == "two":
            container[f"{key}/more"] = value
        else:
            container[key] = _packable(odd_value(random))
    return tree, ", ".join(steps)


def _leaves(tree: dict[Any, Any]) -> Any:
    """(map, name) of everything in a tree that is no map."""
    for key, value in list(tree.items()):
        if isinstance(value, dict) and value:
            yield from _leaves(value)
        else:
            yield tree, key


def _odd_array(array: msgpack.ExtType, random: Random) -> msgpack.ExtType:
    try:
        shape, dtype, data = msgpack.unpackb(array.data)
        numbers = np.frombuffer(data, dtype).copy()
    except Exception:  # was mutated before
        return msgpack.ExtType(_ARRAY, mutate_bytes(array.data, random, [array.data])[0])
    step = random.choice(("shape", "dtype", "data", "parts", "value", "bytes"))
    if step == "shape":
        shape = _odd_shape(shape, random)
    elif step == "dtype":
        dtype = random.choice((*_DTYPES, _packable(odd_value(random))))
    elif step == "data":
        data = random.choice((data[:-1], data + b"\0" * 4, b"", data * 2, [1, 2], data.hex(), None))
    elif step == "value" and numbers.size and numbers.dtype.kind == "f":
        numbers[random.randrange(numbers.size)] = random.choice((np.nan, np.inf, 1e30, 0.0))
        data = numbers.tobytes()
    elif step == "parts":
        parts: Any = random.choice(((shape, dtype), (shape, dtype, data, data), {"0": shape}, 3, (), [[[]]]))
        return msgpack.ExtType(_ARRAY, msgpack.packb(_packable(parts)))
    else:
        return msgpack.ExtType(_ARRAY, mutate_bytes(array.data, random, [array.data])[0])
    return _extension(_packable(shape), dtype, data)


def _packable(value: Any) -> Any:
    """A value that msgpack can write: numbers within 64 bits, text that is UTF-8."""
    if isinstance(value, dict):
        return {_packable(key): _packable(below) for key, below in value.items()}
    if isinstance(value, list | tuple):
        return [_packable(below) for below in value]
    if isinstance(value, int) and not isinstance(value, bool):
        return max(-(2**63), min(value, 2**64 - 1))
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value


def _arrays_in(tree: Any) -> Any:
    """The arrays of a tree as NumPy has them; the pieces of those that are cut up."""
    if isinstance(tree, dict):
        for value in tree.values():
            yield from _arrays_in(value)
    elif isinstance(tree, msgpack.ExtType) and tree.code == _ARRAY:
        _, dtype, data = msgpack.unpackb(tree.data)
        yield np.frombuffer(data, "V2" if dtype == "bfloat16" else dtype)


class FolderConversion(Conversion):
    """A folder with several files; `originals` has those of each by their paths."""

    suffix = ""

    def case_of_files(self, name: str, files: Files, how: str, expected: str = "any") -> Case:
        """A case of these files, without those below another file."""
        clear = {
            path: files[path] for path in files if not any(above.as_posix() in files for above in Path(path).parents)
        }
        return Case(f"{name}: {how}"[:500], clear, self.arguments.get(name, {}), expected)


class Arrays(FolderConversion):
    """Folders of Orbax and of big_vision's trainer, and the same arrays in zarr 2 and 3 without compression."""

    name = "arrays"

    def prepare(self, folder: Path) -> None:
        """Nothing here uses tensorstore, whose threads would not survive the fork."""
        self.arguments = {}
        convert_to_folder(MORE / "container.npz", folder / "whole")
        self.whole = [fingerprint(load_file(folder / "whole" / "model.safetensors"))]
        with np.load(MORE / "container.npz") as file:
            arrays = {name.replace("/", "."): file[name] for name in file.files}
        self.originals = {
            "big_vision": files_below(MORE / "tensorstore_folder-000000010"),
            "orbax": files_below(MORE / "orbax_folder"),
            "orbax_train": files_below(MORE / "orbax_train_folder"),
            "zarr": _as_zarr(arrays),
            "zarr3": _as_zarr3(arrays),
        }

    def make(self, random: Random) -> Case:
        name = random.choice(list(self.originals))
        files = dict(self.originals[name])
        steps, expected = [], "same"
        for _ in range(random.choice((1, 1, 1, 2, 3))):
            how, is_checked = self._mutate(files, random)
            steps.append(how)
            expected = expected if is_checked else "any"
        return self.case_of_files(name, files, ", ".join(steps), expected)

    def _mutate(self, files: Files, random: Random) -> tuple[str, bool]:
        """Mutate one file, in place; whether nothing but the same arrays may be read afterward."""
        metadata = [name for name in files if name.endswith(("/.zarray", "/zarr.json", "/_METADATA"))]
        step = random.choice(("metadata", "metadata", "metadata", "bytes", "bytes", "remove", "rename", "copy", "add"))
        if not files:
            return "nothing is left", False
        name = random.choice(metadata if step == "metadata" and metadata else list(files))
        if step == "metadata" and metadata:
            files[name], how = _mutate_metadata(files[name], random)
            return f"{name}: {how}", False
        if step == "bytes":
            files[name], how = mutate_bytes(files[name], random, [files[name]])
            return f"{name}: {how}", name in ("input/manifest.ocdbt", "input/_sharding") or "/c/" in name
        if step == "remove":
            del files[name]
        elif step == "rename":
            folder, _, file = name.rpartition("/")
            files[f"{folder}/{random.choice((file + 'x', file.upper(), file + '.0', file + '/0', '0', '.zarray'))}"] = (
                files.pop(name)
            )
        elif step == "copy":
            files[name] = files[random.choice(list(files))]
        else:
            names = ("input/.zarray", "input/zarr.json", "input/manifest.ocdbt", "input/x/.zarray", "input/_METADATA")
            files[random.choice(names)] = random.choice((b"", b"{}", files[name], random.randbytes(99)))
        return f"{step} {name}", False

    def compare(self, case: Case, result: Any) -> str | None:
        if not case.how.startswith("zarr: ") or case.expected == "same":
            return None
        theirs = _numbers_of_zarr(case.files)
        ours = [tensor.numpy().ravel() for tensor in result["arrays"].values()]
        return None if theirs is None or same_numbers(ours, theirs) else "NumPy reads other numbers in the chunks"


def _as_zarr(arrays: dict[str, np.ndarray]) -> Files:
    """Arrays as zarr 2 describes them, each in one chunk."""
    files = {}
    for name, array in arrays.items():
        metadata = {
            "zarr_format": 2,
            "shape": array.shape,
            "chunks": array.shape,
            "dtype": array.dtype.str,
            "order": "C",
        }
        metadata |= {"compressor": None, "filters": None, "fill_value": None, "dimension_separator": "."}
        files[f"input/{name}/.zarray"] = json.dumps(metadata).encode()
        files[f"input/{name}/{'.'.join('0' * array.ndim)}"] = array.tobytes()
    return files


def _as_zarr3(arrays: dict[str, np.ndarray]) -> Files:
    """Arrays as zarr 3 describes them, in chunks of half their rows."""
    files = {}
    for name, array in arrays.items():
        rows = max(1, len(array) // 2)
        chunk = {"name": "regular", "configuration": {"chunk_shape": [rows, *array.shape[1:]]}}
        metadata = {"zarr_format": 3, "node_type": "array", "shape": array.shape, "data_type": str(array.dtype)}
        metadata |= {
            "chunk_grid": chunk,
            "chunk_key_encoding": {"name": "default"},
            "fill_value": 0.0,
            "attributes": {},
        }
        metadata["codecs"] = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
        files[f"input/{name}/zarr.json"] = json.dumps(metadata).encode()
        for index in range(0, len(array), rows):
            key = "/".join(("c", str(index // rows), *"0" * (array.ndim - 1)))
            data = array[index : index + rows].tobytes()
            files[f"input/{name}/{key}"] = data + _crc32c(data).to_bytes(4, "little")
    return files


def _crc32c(data: bytes) -> int:
    """The checksum of RFC 3720, appendix B.4."""
    value = 0xFFFFFFFF
    for byte in data:
        value = _CRC32C[(value ^ byte) & 0xFF] ^ (value >> 8)
    return value ^ 0xFFFFFFFF


def _crc32c_of_byte(value: int) -> int:
    for _ in range(8):
        value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
    return value


_CRC32C = [_crc32c_of_byte(value) for value in range(256)]


def _mutate_metadata(text: bytes, random: Random) -> tuple[bytes, str]:
    """The metadata of an array, or of a tree: sizes, types and codecs, values of JSON, or bytes."""
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError):  # was mutated before
        return mutate_bytes(text, random, [text])
    if not isinstance(tree, dict) or "shape" not in tree or random.random() < 0.4:
        if random.random() < 0.2:
            return mutate_bytes(text, random, [text])
        tree, how = mutate_tree(tree, random, [tree])
        return write_json(tree, random), how
    shape = tree["shape"] if isinstance(tree["shape"], list) else [7]
    numbers = [size for size in shape if isinstance(size, int)] or [7]
    field = random.choice(("shape", "shape", "chunks", "chunk_grid", *_FIELDS))
    if field in ("shape", "chunks", "chunk_grid"):
        value = _odd_shape(numbers, random)
        value = {"name": "regular", "configuration": {"chunk_shape": value}} if field == "chunk_grid" else value
    else:
        value = random.choice(_FIELDS[field])
    tree[field] = value
    return write_json(tree, random), f"{field} := {str(value)[:60]}"


_SHARDS = [
    {
        "name": "sharding_indexed",
        "configuration": {
            "chunk_shape": [1],
            "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
            "index_codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}],
        },
    }
]


_FIELDS: dict[str, tuple[Any, ...]] = {  # of the metadata in zarr 2 and 3
    "dtype": ("<f8", ">f4", "<f2", "bfloat16", "|V2", "<c8", "|b1", "<i8", "|O", "<U4", [["a", "<f4"]], "<M8[s]"),
    "data_type": ("float64", "bfloat16", "int4", "complex64", "bool", "string", "float8_e4m3fn", "r16"),
    "fill_value": (0, None, "NaN", 1e400, "x", [0]),
    "order": ("F", "A", None),
    "compressor": (None, {"id": "zstd", "level": 99}, {"id": "blosc"}, {"id": "gzip"}, {"id": "x"}, {"id": "zlib"}),
    "filters": ([{"id": "delta"}],),
    "dimension_separator": ("/", ".", "", "x"),
    "codecs": ([], [{"name": "gzip"}], _SHARDS, _SHARDS * 9, [{"name": "transpose"}], None),
    "chunk_key_encoding": ({"name": "v2"}, {"name": "x"}, None),
    "storage_transformers": ([{"name": "x"}],),
    "zarr_format": (1, 2, 3, 4, "2"),
}


def _numbers_of_zarr(files: Files) -> list[np.ndarray] | None:
    """The numbers as zarr 2 describes them; None where an array is not one chunk without compression."""
    found = []
    for name in files:
        if not name.endswith("/.zarray") or name.count("/") != 2:
            continue
        metadata = json.loads(files[name].decode("utf-8-sig"))
        chunks = [other for other in files if other.startswith(name.removesuffix(".zarray")) and other != name]
        if metadata["compressor"] is not None or metadata["chunks"] != metadata["shape"] or len(chunks) != 1:
            return None
        if not isinstance(metadata["dtype"], str):  # a structure of one number
            return None
        found.append(floats(np.frombuffer(files[chunks[0]], metadata["dtype"])))
    return found


class Folders(FolderConversion):
    """Folders that hold a checkpoint and what belongs to it: files that are missing, changed, in place of others."""

    name = "folder"
    arguments = {"timm": {"position_grid": (5, 9)}}  # noqa: RUF012

    def prepare(self, folder: Path) -> None:
        square = {
            "image_size": (24, 24),
            "patch_size": (4, 4),
            "hidden_act": "gelu",
            "position_interpolation": "bicubic",
        }
        model = HfViTForImageClassification.from_pretrained(save_tiny(folder / "square", **square))
        export(model, folder / "written", "transformers", processor=HfViTImageProcessor("transformers", size=24))
        from transformers import ViTForImageClassification

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

    def make(self, random: Random) -> Case:
        name = random.choice(list(self.originals))
        files, steps = dict(self.originals[name]), []
        foreign = self.originals[random.choice(list(self.originals))]
        for _ in range(random.choice((1, 1, 2, 3))):
            steps.append(_mutate_folder(files, random, foreign))
        return self.case_of_files(name, files, ", ".join(steps))


_JSON = ("config.json", "preprocessor_config.json", ".index.json")
_ADDED = (
    "config.json", "preprocessor_config.json", "conversion.json", "adapter_config.json", "generation_config.json",
    "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json",
    "flax_model.msgpack", "model.h5", "saved_model.pb", "x.npz", "x.pth", "x-LAST", "manifest.ocdbt", "_METADATA",
    "a/.zarray", "a/zarr.json",
)  # fmt: skip


def _mutate_folder(files: Files, random: Random, foreign: Files) -> str:
    """Change a folder in place; what was done in words."""
    step = random.choice(
        ("json", "json", "json", "bytes", "remove", "rename", "empty", "exchange", "foreign", "nest", "add")
    )
    described = [name for name in files if name.endswith(_JSON)]
    if not files or (step == "json" and not described):
        return "nothing"
    name = random.choice(described if step == "json" else list(files))
    if step == "json":
        files[name], how = _mutate_metadata(files[name], random)
        return f"{name}: {how}"
    if step == "bytes":
        files[name], how = mutate_bytes(files[name], random, [files[name]])
        return f"{name}: {how}"
    if step == "remove":
        del files[name]
    elif step == "rename":
        files[f"input/{random.choice(_ADDED)}"] = files.pop(name)
    elif step == "empty":
        files[name] = random.choice((b"", b"{}", b"null", b"[]", b"\0" * 99, b"0" * 31))
    elif step == "exchange":
        other = random.choice(list(files))
        files[name], files[other] = files[other], files[name]
    elif step == "foreign":
        files.update({random.choice(list(foreign)): foreign[other] for other in random.sample(list(foreign), 1)})
    elif step == "nest":
        files[f"{name}/{random.choice(('0', '.zarray', 'manifest.ocdbt', 'config.json'))}"] = files.pop(name)
    else:
        files[f"input/{random.choice(_ADDED)}"] = random.choice((b"", b"{}", files[name], random.randbytes(50)))
    return f"{step} {name}"
