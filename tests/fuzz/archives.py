"""Mutations that know a format: members and headers of an .npz, a .pth and a .safetensors, chunks of a PNG."""

import io
import json
import struct
import warnings
import zipfile
import zlib
from collections.abc import Callable
from contextlib import suppress
from random import Random
from typing import Any

import numpy as np
import torch

from .mutators import Records, mutate_bytes, mutate_records, mutate_tree

_NUMBERS = (0, 1, 2, 7, 0xFF, 0xFFFF, 0x10000, 2**31 - 1, 2**31, 2**32 - 1)
# Records of a zip archive: signature, length without the name, fields as (offset, bytes).
_RECORDS = {
    b"PK\1\2": (46, ((8, 2), (10, 2), (12, 4), (16, 4), (20, 4), (24, 4), (28, 2), (30, 2), (32, 2), (34, 2), (38, 4),
                     (42, 4))),
    b"PK\3\4": (30, ((4, 2), (6, 2), (8, 2), (14, 4), (18, 4), (22, 4), (26, 2), (28, 2))),
    b"PK\5\6": (20, ((4, 2), (6, 2), (8, 2), (10, 2), (12, 4), (16, 4), (20, 2))),
}  # fmt: skip


def mutate_directory(data: bytes, random: Random) -> tuple[bytes, str]:
    """Change a field, or the name, in one of the records of a zip archive; the data and their checksums stay."""
    changed = bytearray(data)
    signature = random.choice(list(_RECORDS))
    length, fields = _RECORDS[signature]
    places = [place for place in range(len(data)) if data.startswith(signature, place)] if signature in data else [0]
    place, (offset, width) = random.choice(places), random.choice(fields)
    if random.random() < 0.15:
        offset, width = length + random.randrange(12), 1
    old = int.from_bytes(changed[place + offset : place + offset + width], "little")
    value = random.choice((*_NUMBERS, old + 1, old - 1, old * 2, random.getrandbits(32))) % 256**width
    changed[place + offset : place + offset + width] = value.to_bytes(width, "little")
    return bytes(changed), f"{signature[2:].hex()} + {offset} of {width} bytes := {value}"


def _zipped(members: Records, compressed: bool) -> bytes:
    """An archive of members, whose checksums are right."""
    file, method = io.BytesIO(), zipfile.ZIP_DEFLATED if compressed else zipfile.ZIP_STORED
    with zipfile.ZipFile(file, "w") as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a name may be there twice
        for name, content in members:
            archive.writestr(zipfile.ZipInfo(name), content, method)
    return file.getvalue()


def _described(array: np.ndarray) -> dict[str, Any]:
    """What a .npy file says of an array, and its data."""
    return {"descr": array.dtype.str, "fortran_order": False, "shape": list(array.shape), "data": array.tobytes()}


def _npy(entry: Any) -> bytes:
    """A .npy file of an entry as `_described` makes it, which may say anything."""
    if not isinstance(entry, dict):
        return str(entry).encode("utf-8", "replace")
    header = {name: value for name, value in entry.items() if name not in ("data", "version")}
    header = {name: tuple(value) if isinstance(value, list) else value for name, value in header.items()}
    text = repr(header).encode("utf-8", "replace")
    head = text + b" " * (-(len(text) + 11) % 64) + b"\n"
    version, data = entry.get("version", 1), entry.get("data", b"")
    length = struct.pack("<I" if version == 2 or len(head) > 65_535 else "<H", len(head))
    first = version if isinstance(version, int) and 0 <= version < 256 else 1
    return b"\x93NUMPY" + bytes((first, 0)) + length + head + (data if isinstance(data, bytes) else b"x")


def rewrite_npz(arrays: dict[str, np.ndarray], random: Random) -> tuple[bytes, str, str]:
    """An .npz of arrays that are others, or are written or described in another way; its checksums are right.

    Returns:
        The file, the mutation in words, and what is expected of a reader, as in `Case`.
    """
    way = random.choice(("tree", "tree", "tree", "members", "layout"))
    if way == "layout":
        entries = [(f"{name}.npy", _npy(_other_layout(array, random))) for name, array in arrays.items()]
        random.shuffle(entries)
        return _zipped(entries, compressed=random.random() < 0.5), way, "same"
    tree: Any = {name: _described(array) for name, array in arrays.items()}
    how = ""
    if way == "tree":
        tree, how = mutate_tree(tree, random, [tree])
    entries = [(f"{name}.npy", _npy(entry)) for name, entry in tree.items()] if isinstance(tree, dict) else []
    if way == "members":
        names = [f"{name}.npy" for name in (*arrays, "extra", "Transformer/encoderblock_3/x", "../x", "a\\b", "\u202e")]
        entries, how = mutate_records(
            entries, random, names, [entries[0][1]], lambda _, data: _other_head(data, random)
        )
    return _zipped(entries, compressed=random.random() < 0.1), how, "any"


def _other_layout(array: np.ndarray, random: Random) -> dict[str, Any]:
    """Other bytes for the same numbers."""
    kind = random.choice(("fortran", "big", "version", "double", "plain"))
    if kind == "fortran":
        return {**_described(array), "fortran_order": True, "data": array.tobytes("F")}
    if kind == "big":
        return _described(array.astype(array.dtype.newbyteorder(">")))
    if kind == "double" and array.dtype == np.float32:
        return _described(array.astype(np.float64))
    return {**_described(array), "version": 2 if kind == "version" else 1}


def _other_head(data: bytes, random: Random) -> tuple[bytes, str]:
    """A member whose header was mutated."""
    head, how = mutate_bytes(data[:128], random, [data[:128]])
    return head + data[128:], how


def rewrite_pth(data: bytes, random: Random) -> tuple[bytes, str]:
    """A .pth of which members were mutated, most often the pickle; the checksums are right."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = [(name, archive.read(name)) for name in archive.namelist()]
    chosen = next((index for index, (name, _) in enumerate(members) if name.endswith("data.pkl")), 0)
    if random.random() < 0.7:
        content, how = mutate_bytes(members[chosen][1], random, [members[chosen][1]])
        members[chosen] = members[chosen][0], content
    else:
        members, how = mutate_records(members, random, ("other/data.pkl", "archive/version"))
    return _zipped(members, compressed=random.random() < 0.05), how


TENSOR_TYPES = (
    "uint8 uint8 float32 float32 float64 float16 bfloat16 int8 int16 int32 int64 uint16 uint32 uint64 bool complex64 "
    "float8_e4m3fn float8_e5m2"
).split()


def odd_tensor(tensor: torch.Tensor, random: Random) -> tuple[Any, str]:
    """A tensor with other numbers, or of another type, shape or layout; itself where it cannot have that."""
    twice, row = [tensor, tensor], tensor.flatten()[None]
    makers: dict[str, Callable[[], Any]] = {
        "NaN": lambda: tensor * torch.nan,
        "type": lambda: tensor.to(getattr(torch, random.choice(TENSOR_TYPES))),
        "sparse": lambda: random.choice((tensor.to_sparse(), row.to_sparse(), row.to_sparse_csr())),
        "meta": lambda: tensor.to("meta"),
        "parameter": lambda: torch.nn.Parameter(tensor),
        "transposed": lambda: tensor.transpose(0, -1),
        "expanded": lambda: tensor.flatten()[:1].expand(random.choice(((2**20,) * 3, (100_000, 1_000_000, 3)))),
        "wide": lambda: tensor[:1].expand(2**20 if tensor.ndim < 4 else 1, *tensor.shape[1:]),  # no batch of a million
        "scalar": tensor.sum,
        "empty": lambda: tensor[:0],
        "quantized": lambda: torch.quantize_per_tensor(tensor.float(), 0.1, 0, torch.quint8),
        "no tensor": lambda: random.choice(("x", None, {"weight": tensor}, [tensor])),
        "strided": lambda: torch.stack(twice, -1)[..., 0],
        "nested": lambda: torch.nested.nested_tensor(twice, layout=random.choice((torch.strided, torch.jagged))),
        "flipped": lambda: tensor.flip(0).conj(),
        "negative": lambda: torch.view_as_real(torch.complex(tensor.float(), tensor.float()).conj())[..., 1],
    }
    kind = random.choice(list(makers))
    with suppress(RuntimeError, IndexError, NotImplementedError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return makers[kind](), kind
    return tensor, kind


def odd_pth(weights: dict[str, torch.Tensor], random: Random) -> tuple[bytes, str]:
    """What `torch.save` writes of weights of which one is odd, or among odd neighbors."""
    content: dict[Any, Any] = dict(weights)
    name = random.choice(list(content))
    tensor = content[name]
    content[name], kind = odd_tensor(tensor, random)
    around = random.choice(("", "", "", "rename", "container", "number", "list", "more"))
    if around == "rename":
        new = random.choice(("x", name + ".x", "blocks.99999999999.x", "blocks.x.y", "blocks.", "\0"))
        content[new] = content.pop(name)
    elif around == "number":
        content[3] = tensor
    elif around == "more":
        content["optimizer"] = {"state": [1, 2, {"a": tensor}]}
    elif around == "container":
        content = {random.choice(("model", "state_dict", "teacher", "x")): content}
    file = io.BytesIO()
    torch.save([content] if around == "list" else content, file, _use_new_zipfile_serialization=random.random() < 0.8)
    return file.getvalue(), f"{name}: {kind} {around}".strip()


def rewrite_safetensors(data: bytes, random: Random) -> tuple[bytes, str]:
    """A .safetensors file whose header was mutated."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header, how = mutate_tree(header, random, [header])
    text = json.dumps(header).encode()
    stated = len(text) if random.random() < 0.9 else random.choice((0, 1, len(text) + 1, 2**31, 2**63, 2**64 - 1))
    return stated.to_bytes(8, "little") + text + data[8 + length :], how


def mutate_png(data: bytes, random: Random) -> tuple[bytes, str]:
    """A PNG of which a chunk was mutated, repeated, moved or added; the checksums are right."""
    chunks, place = [], 8
    while place + 12 <= len(data):
        (length,) = struct.unpack(">I", data[place : place + 4])
        chunks.append((data[place + 4 : place + 8].decode("latin-1"), data[place + 8 : place + 8 + length]))
        place += 12 + length
    if random.random() < 0.15:
        how = "another head"
        sizes = random.choices((0, 1, 8, 9, 4_000, 20_000, 100_000, 2**31 - 1, 2**32 - 1), k=2)
        kinds = random.choice((1, 2, 4, 8, 16, 3)), random.choice((0, 2, 3, 4, 6, 7)), 0, 0, random.choice((0, 1, 2))
        chunks[0] = ("IHDR", struct.pack(">II5B", *sizes, *kinds))
    elif random.random() < 0.2:
        bomb = zlib.compress(bytes(random.choice((10, 10**6, 10**8))), 9)
        how, added = random.choice((
            ("iCCP", b"x\0\0" + bomb), ("zTXt", b"x\0\0" + bomb), ("iTXt", b"x\0\1\0\0\0" + bomb),
            ("eXIf", random.randbytes(40)), ("tRNS", random.randbytes(random.choice((0, 1, 2, 6, 300)))),
            ("PLTE", random.randbytes(random.choice((0, 1, 3, 768, 999)))), ("fcTL", random.randbytes(26)),
            ("acTL", struct.pack(">II", random.choice((0, 1, 2**31)), 0)), ("gAMA", b"\0\0\0\0"),
        ))  # fmt: skip
        chunks.insert(random.randrange(1, len(chunks)), (how, added))
    else:
        chunks, how = mutate_records(chunks, random, [name for name, _ in chunks])
    pieces = [(name.encode("latin-1")[:4], content) for name, content in chunks]
    sums = (struct.pack(">I", zlib.crc32(name + content)) for name, content in pieces)
    body = (struct.pack(">I", len(content)) + name + content for name, content in pieces)
    return data[:8] + b"".join(map(bytes.__add__, body, sums)), f"PNG {how}"
