"""Mutations that know a format: members and headers of an .npz, a .pth and a .safetensors, chunks of a PNG."""

import io
import json
import re
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

from ..photographs import png_chunk
from .mutators import Records, mutate_bytes, mutate_records, mutate_tree

_NUMBERS = (0, 1, 2, 7, 0xFF, 0xFFFF, 0x10000, 2**31 - 1, 2**31, 2**32 - 1)


def mutate_directory(data: bytes, random: Random) -> bytes:
    """Change a number, or the name, in one of the records of a zip archive; the data and their checksums stay."""
    changed, signature = bytearray(data), random.choice((b"PK\1\2", b"PK\3\4", b"PK\5\6"))
    places = [found.start() for found in re.finditer(re.escape(signature), data)]
    start, width = random.choice(places or [0]) + random.randrange(4, 58, 2), random.choice((1, 2, 2, 4, 4))
    old = int.from_bytes(changed[start : start + width], "little")
    value = random.choice((*_NUMBERS, old + 1, old - 1, old * 2, random.getrandbits(32))) % 256**width
    changed[start : start + width] = value.to_bytes(width, "little")
    return bytes(changed)


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


def rewrite_npz(arrays: dict[str, np.ndarray], random: Random) -> bytes:
    """An .npz of arrays that are others, or are described in another way; its checksums are right."""
    tree: Any = {name: _described(array) for name, array in arrays.items()}
    is_tree = random.random() < 0.75
    if is_tree:
        tree = mutate_tree(tree, random)
    entries = [(f"{name}.npy", _npy(entry)) for name, entry in tree.items()] if isinstance(tree, dict) else []
    if not is_tree:
        names = [f"{name}.npy" for name in (*arrays, "extra", "Transformer/encoderblock_3/x", "../x", "a\\b", "\u202e")]
        entries = mutate_records(entries, random, names, change=mutate_head)
    return _zipped(entries, compressed=random.random() < 0.1)


def mutate_head(data: bytes, random: Random) -> bytes:
    size = random.choice((64, 128))
    return mutate_bytes(data[:size], random) + data[size:]


def rewrite_pth(data: bytes, random: Random) -> bytes:
    """A .pth of which members were mutated, most often the pickle; the checksums are right."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = [(name, archive.read(name)) for name in archive.namelist()]
    if random.random() < 0.7:
        members = [(name, mutate_bytes(data, random) if name.endswith("data.pkl") else data) for name, data in members]
    else:
        members = mutate_records(members, random, ("other/data.pkl", "archive/version"))
    return _zipped(members, compressed=random.random() < 0.05)


TENSOR_TYPES = (
    "uint8 uint8 float32 float32 float64 float16 bfloat16 int8 int16 int32 int64 uint16 uint32 uint64 bool complex64 "
    "float8_e4m3fn float8_e5m2"
).split()


def odd_tensor(tensor: torch.Tensor, random: Random) -> Any:
    """A tensor with other numbers, or of another type, shape or layout; itself where it cannot have that."""
    twice, row = [tensor, tensor], tensor.flatten()[None]
    makers: list[Callable[[], Any]] = [
        lambda: tensor * torch.nan,
        lambda: tensor.to(getattr(torch, random.choice(TENSOR_TYPES))),
        lambda: random.choice((tensor.to_sparse(), row.to_sparse(), row.to_sparse_csr())),
        lambda: tensor.to("meta"),
        lambda: torch.nn.Parameter(tensor),
        lambda: tensor.transpose(0, -1),
        lambda: tensor.flatten()[:1].expand(random.choice(((2**20,) * 3, (100_000, 1_000_000, 3)))),
        lambda: tensor[:1].expand(2**20 if tensor.ndim < 4 else 1, *tensor.shape[1:]),  # no batch of a million
        tensor.sum,
        lambda: tensor[:0],
        lambda: torch.quantize_per_tensor(tensor.float(), 0.1, 0, torch.quint8),
        lambda: random.choice(("x", None, {"weight": tensor}, [tensor])),
        lambda: torch.stack(twice, -1)[..., 0],
        lambda: torch.nested.nested_tensor(twice, layout=random.choice((torch.strided, torch.jagged))),
        lambda: tensor.flip(0).conj(),
        lambda: torch.view_as_real(torch.complex(tensor.float(), tensor.float()).conj())[..., 1],
    ]
    with suppress(RuntimeError, IndexError, NotImplementedError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return random.choice(makers)()
    return tensor


def odd_pth(weights: dict[str, torch.Tensor], random: Random) -> bytes:
    """What `torch.save` writes of weights of which one is odd, or among odd neighbors."""
    content: Any = mutate_tree(weights, random) if random.random() < 0.6 else dict(weights)
    if isinstance(content, dict) and (names := [name for name in content if isinstance(content[name], torch.Tensor)]):
        name = random.choice(names)
        content[name] = odd_tensor(content[name], random)
    if random.random() < 0.2:
        content = {random.choice(("model", "state_dict", "teacher", "x")): content}
    file = io.BytesIO()
    torch.save(content, file, _use_new_zipfile_serialization=random.random() < 0.8)
    return file.getvalue()


def mutate_safetensors(data: bytes, random: Random, others: list[bytes]) -> bytes:
    """A .safetensors file of which bytes or, as often, the values of the header were mutated."""
    if random.random() < 0.5:
        return mutate_bytes(data, random, others)
    length = int.from_bytes(data[:8], "little")
    text = json.dumps(mutate_tree(json.loads(data[8 : 8 + length]), random)).encode()
    stated = len(text) if random.random() < 0.9 else random.choice((0, 1, len(text) + 1, 2**31, 2**63, 2**64 - 1))
    return stated.to_bytes(8, "little") + text + data[8 + length :]


def mutate_png(data: bytes, random: Random) -> bytes:
    """A PNG of which a chunk was mutated, repeated, moved or added; the checksums are right."""
    chunks, place = [], 8
    while place + 12 <= len(data):
        (length,) = struct.unpack(">I", data[place : place + 4])
        chunks.append((data[place + 4 : place + 8].decode("latin-1"), data[place + 8 : place + 8 + length]))
        place += 12 + length
    if random.random() < 0.15:
        sizes = random.choices((0, 1, 8, 9, 4_000, 20_000, 100_000, 2**31 - 1, 2**32 - 1), k=2)
        kinds = random.choice((1, 2, 4, 8, 16, 3)), random.choice((0, 2, 3, 4, 6, 7)), 0, 0, random.choice((0, 1, 2))
        chunks[0] = ("IHDR", struct.pack(">II5B", *sizes, *kinds))
    elif random.random() < 0.2:
        bomb = zlib.compress(bytes(random.choice((10, 10**6, 10**8))), 9)
        added = random.choice((
            ("iCCP", b"x\0\0" + bomb), ("zTXt", b"x\0\0" + bomb), ("iTXt", b"x\0\1\0\0\0" + bomb),
            ("eXIf", random.randbytes(40)), ("tRNS", random.randbytes(random.choice((0, 1, 2, 6, 300)))),
            ("PLTE", random.randbytes(random.choice((0, 1, 3, 768, 999)))), ("fcTL", random.randbytes(26)),
            ("acTL", struct.pack(">II", random.choice((0, 1, 2**31)), 0)), ("gAMA", b"\0\0\0\0"),
        ))  # fmt: skip
        chunks.insert(random.randrange(1, len(chunks)), added)
    else:
        chunks = mutate_records(chunks, random, [name for name, _ in chunks])
    return data[:8] + b"".join(png_chunk(name.encode("latin-1")[:4], content) for name, content in chunks)
