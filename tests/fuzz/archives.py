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

from .mutators import mutate_bytes, mutate_tree, odd_value

_NUMBERS = (0, 1, 2, 7, 0xFF, 0xFFFF, 0x10000, 2**31 - 1, 2**31, 2**32 - 1)
# Places in a zip archive: signature of a record, its fields as (offset, bytes).
_RECORDS = {
    b"PK\1\2": (
        (8, 2),
        (10, 2),
        (12, 4),
        (16, 4),
        (20, 4),
        (24, 4),
        (28, 2),
        (30, 2),
        (32, 2),
        (34, 2),
        (38, 4),
        (42, 4),
    ),
    b"PK\3\4": ((4, 2), (6, 2), (8, 2), (14, 4), (18, 4), (22, 4), (26, 2), (28, 2)),
    b"PK\5\6": ((4, 2), (6, 2), (8, 2), (10, 2), (12, 4), (16, 4), (20, 2)),
}
Arrays = dict[str, np.ndarray]


def mutate_directory(data: bytes, random: Random) -> tuple[bytes, str]:
    """Change a field, or the name, in one of the records of a zip archive; the data and their checksums stay."""
    changed = bytearray(data)
    signature = random.choice(list(_RECORDS))
    places = [place for place in range(len(data)) if data.startswith(signature, place)] if signature in data else [0]
    place, (offset, width) = random.choice(places), random.choice(_RECORDS[signature])
    if random.random() < 0.15:
        offset, width = {b"PK\1\2": 46, b"PK\3\4": 30, b"PK\5\6": 20}[signature] + random.randrange(12), 1
    old = int.from_bytes(changed[place + offset : place + offset + width], "little")
    value = random.choice((*_NUMBERS, old + 1, old - 1, old * 2, random.getrandbits(32))) % 256**width
    changed[place + offset : place + offset + width] = value.to_bytes(width, "little")
    return bytes(changed), f"{signature[2:].hex()} + {offset} of {width} bytes := {value}"


def npy(
    array: np.ndarray, shape: Any = None, descr: Any = None, fortran: bool | str = False, version: int = 1
) -> bytes:
    """A .npy file whose header may say anything about the data."""
    descr = array.dtype.str if descr is None else descr
    shape = array.shape if shape is None else shape
    text = f"{{'descr': {descr!r}, 'fortran_order': {fortran}, 'shape': {shape!r}, }}"
    head = (text + " " * (-(len(text) + 11) % 64) + "\n").encode()
    length = struct.pack("<H", len(head)) if version == 1 else struct.pack("<I", len(head))
    return b"\x93NUMPY" + bytes((version, 0)) + length + head + array.tobytes("F" if fortran is True else "C")


def zipped(members: list[tuple[str, bytes]], compressed: bool = False) -> bytes:
    """An archive of members, whose checksums are right."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED if compressed else zipfile.ZIP_STORED) as archive:
        for name, content in members:
            archive.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED if compressed else zipfile.ZIP_STORED)
    return file.getvalue()


def rewrite_npz(arrays: Arrays, random: Random) -> tuple[bytes, str, str]:
    """An .npz of the same arrays, one of which is another, or is written or described in another way.

    Returns:
        The file, the mutation in words, and what is expected of a reader, as in `Case`.
    """
    name = random.choice(list(arrays))
    array = arrays[name]
    how, odd, expected = random.choice((_other_values, _other_layout, _other_shape, _other_header))(array, random)
    members = [(key, odd if key == name else npy(value)) for key, value in arrays.items()]
    step = random.choice(("", "", "", "", "order", "compress", "drop", "rename", "two", "more"))
    if step == "order":
        random.shuffle(members)
    elif step == "drop":
        members = [member for member in members if member[0] != name]
    elif step == "rename":
        other = random.choice(list(arrays))
        new = random.choice(
            (name + "x", name.upper(), name.replace("/", "\\"), "../" + name, other, name.replace("_0", "_99999999"))
        )
        members = [(new if key == name else key, content) for key, content in members]
    elif step == "more":
        members.append(
            (random.choice(("extra", f"{name}/extra", "Transformer/encoderblock_3/x", "\u202e")), npy(array))
        )
    elif step == "two":
        members.append((name, npy(array[..., ::-1])))
    if step not in ("", "order", "compress"):
        expected = "any"
    data = zipped([(f"{key}.npy", content) for key, content in members], compressed=step == "compress")
    return data, f"{name}: {how} {step}".strip(), expected


def _other_values(array: np.ndarray, random: Random) -> tuple[str, bytes, str]:
    changed = array.copy()
    value = random.choice((np.nan, np.inf, -np.inf, 3e38, 1e-42, 0.0))
    if changed.size and changed.dtype.kind == "f":
        changed.flat[random.randrange(changed.size)] = value
    is_number = np.isfinite(value) or changed.dtype.kind != "f" or not changed.size
    return f"has {value}", npy(changed), "any" if is_number else "refused"


def _other_layout(array: np.ndarray, random: Random) -> tuple[str, bytes, str]:
    """Other bytes for the same numbers, or numbers of another type."""
    kind = random.choice(("fortran", "big", "version 2", "double", "cast"))
    if kind == "fortran":
        return kind, npy(array, fortran=True), "same"
    if kind == "big":
        return kind, npy(array.astype(array.dtype.newbyteorder(">"))), "same"
    if kind == "version 2":
        return kind, npy(array, version=2), "same"
    if kind == "double" and array.dtype == np.float32:
        return kind, npy(array.astype(np.float64)), "same"
    if array.dtype.kind == "V":
        return "plain", npy(array), "same"
    dtype = random.choice(("f2", "i4", "u8", "?", "c8", "c16", "f16", "S3", "U2", "V2", "V3", "M8[s]", ">i2"))
    return f"as {dtype}", npy(np.zeros(array.shape, dtype) if dtype[0] == "V" else array.astype(dtype)), "any"


def _other_shape(array: np.ndarray, random: Random) -> tuple[str, bytes, str]:
    """The data as they are, and a header with another shape."""
    shape, size = list(array.shape), array.size
    choices: list[Any] = [
        tuple(reversed(shape)), (size,), (1, *shape), (*shape, 1), (), (0,), (size, 0), (-1, *shape), (2**63,),
        (2**32, 2**32), (0, 2**62),
        (size // 2, 2), [size], (size, 1.0), (True, size), tuple([1] * 33 + shape), (10**9, 10**9, 10**9),
        None, "x", tuple([-side for side in shape]),
        (10**400,),
    ]  # fmt: skip
    wanted = random.choice(choices)
    return f"claims {str(wanted)[:60]}", npy(array, shape="None" if wanted is None else wanted), "any"


def _other_header(array: np.ndarray, random: Random) -> tuple[str, bytes, str]:
    """A header that is none, or whose checksum is right although its text was mutated."""
    data = npy(array)
    if random.random() < 0.5:
        descr = random.choice(
            (
                "|O",
                "<f4x",
                "f4",
                ("<f4", (2,)),
                [("a", "<f4")],
                "<f999",
                "|V0",
                "<U0",
                3,
                "<i4",
                "<f8",
                "V2",
                "|V4",
                None,
            )
        )
        return f"descr {descr!r}", npy(array, descr=descr), "refused" if descr == "|O" else "any"
    head = bytearray(data[:128])
    mutated, how = mutate_bytes(bytes(head), random, [bytes(head)])
    return f"header: {how}", mutated + data[128:], "any"


def rewrite_pth(data: bytes, random: Random) -> tuple[bytes, str]:
    """A .pth of the same members, one of which was mutated; its checksum is right."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = [(name, archive.read(name)) for name in archive.namelist()]
    chosen = next((index for index, member in enumerate(members) if member[0].endswith("data.pkl")), 0)
    if random.random() < 0.3:
        chosen = random.randrange(len(members))
    name, content = members[chosen]
    mutated, how = mutate_bytes(content, random, [content])
    members[chosen] = (random.choice((name, name, name, name, name + "x", "other/data.pkl")), mutated)
    return zipped(members, compressed=random.random() < 0.05), f"{name}: {how}"


def odd_pth(weights: dict[str, torch.Tensor], random: Random) -> tuple[bytes, str]:
    """What `torch.save` writes of weights of which one is odd, or among odd neighbors."""
    content: dict[Any, Any] = dict(weights)
    name = random.choice(list(content))
    tensor = content[name]
    makers: dict[str, Callable[[], Any]] = {
        "NaN": lambda: tensor * torch.nan, "half": tensor.half, "bfloat16": tensor.bfloat16, "double": tensor.double,
        "long": tensor.long, "complex": lambda: tensor.to(torch.complex64),
        "float8": lambda: tensor.to(torch.float8_e4m3fn),
        "sparse": lambda: tensor.flatten()[None].to_sparse(), "meta": lambda: tensor.to("meta"),
        "parameter": lambda: torch.nn.Parameter(tensor),
        "transposed": lambda: tensor.transpose(0, -1), "expanded": lambda: tensor.flatten()[:1].expand(100_000,
        1_000_000),
        "scalar": lambda: tensor.sum(), "empty": lambda: tensor[:0],
        "quantized": lambda: torch.quantize_per_tensor(tensor.float(), 0.1, 0, torch.qint8),
        "text": lambda: "x", "None": lambda: None, "dictionary": lambda: {"weight": tensor}, "list": lambda: [tensor],
        "strided": lambda: torch.stack([tensor, tensor], -1)[..., 0], "wide": lambda: tensor[:1].expand(2**20,
        *tensor.shape[1:]),
        "csr": lambda: tensor.flatten()[None].to_sparse_csr(), "nested": lambda: torch.nested.nested_tensor([tensor,
        tensor]),
        "flipped": lambda: tensor.flip(0).conj(), "negative": lambda: torch.view_as_real(torch.complex(tensor.float(),
        tensor.float()).conj())[..., 1],
    }  # fmt: skip
    kind = random.choice(list(makers))
    with suppress(RuntimeError), warnings.catch_warnings():  # not every tensor can be written so
        warnings.simplefilter("ignore")
        content[name] = makers[kind]()
    around = random.choice(("", "", "", "rename", "container", "number", "list", "more"))
    if around == "rename":
        content[random.choice(("x", name + ".x", "blocks.99999999999.x", "blocks.x.y", "blocks.", "\0"))] = content.pop(
            name
        )
    elif around == "number":
        content[3] = tensor
    elif around == "more":
        content["optimizer"] = {"state": [1, 2, {"a": tensor}]}
    packed: Any = (
        {random.choice(("model", "state_dict", "teacher", "x")): content} if around == "container" else content
    )
    file = io.BytesIO()
    torch.save([packed] if around == "list" else packed, file, _use_new_zipfile_serialization=random.random() < 0.8)
    return file.getvalue(), f"{name}: {kind} {around}".strip()


def rewrite_safetensors(data: bytes, random: Random) -> tuple[bytes, str]:
    """A .safetensors file whose header was mutated, as JSON or number by number."""
    length = int.from_bytes(data[:8], "little")
    header, rest = json.loads(data[8 : 8 + length]), data[8 + length :]
    if random.random() < 0.5:
        header, how = mutate_tree(header, random, [header])
    else:
        name = random.choice([key for key in header if key != "__metadata__"])
        field = random.choice(("dtype", "shape", "data_offsets"))
        start, end = header[name]["data_offsets"]
        shape = header[name]["shape"]
        header[name][field] = {
            "dtype": random.choice(
                ("F64", "F16", "BF16", "I8", "BOOL", "U8", "F8_E4M3", "C64", "f32", "X", odd_value(random))
            ),
            "shape": random.choice((shape[::-1], [*shape, 1], [2**63], [2**32, 2**32], [0], [], [-1], [end - start])),
            "data_offsets": random.choice(
                ([end, start], [start, end + 4], [0, 2**63], [start], [start - 4, end - 4], [0, 0], [1.5, 2])
            ),
        }[field]
        how = f"{name} {field}"
    text = json.dumps(header).encode()
    stated = len(text) if random.random() < 0.9 else random.choice((0, 1, len(text) + 1, 2**31, 2**63, 2**64 - 1))
    return stated.to_bytes(8, "little") + text + rest, how


def mutate_png(data: bytes, random: Random) -> tuple[bytes, str]:
    """A PNG of which a chunk was mutated, repeated, moved or added; the checksums are right."""
    chunks, place = [], 8
    while place + 12 <= len(data):
        (length,) = struct.unpack(">I", data[place : place + 4])
        chunks.append((data[place + 4 : place + 8], data[place + 8 : place + 8 + length]))
        place += 12 + length
    index = random.randrange(len(chunks))
    name, content = chunks[index]
    step = random.choice(("mutate", "mutate", "head", "repeat", "drop", "add", "move"))
    if step == "head":
        width, height = (random.choice((0, 1, 8, 9, 4_000, 20_000, 100_000, 2**31 - 1, 2**32 - 1)) for _ in range(2))
        rest = bytes(
            (random.choice((1, 2, 4, 8, 16, 3)), random.choice((0, 2, 3, 4, 6, 7)), 0, 0, random.choice((0, 1, 2)))
        )
        chunks[0] = (b"IHDR", struct.pack(">II", width, height) + rest)
    elif step == "repeat":
        chunks[index:index] = [chunks[index]] * random.choice((1, 2, 1_000))
    elif step == "drop":
        del chunks[index]
    elif step == "add":
        bomb = zlib.compress(bytes(random.choice((10, 10**6, 10**8))), 9)
        added = random.choice((
            (b"iCCP", b"x\0\0" + bomb), (b"zTXt", b"x\0\0" + bomb), (b"iTXt", b"x\0\1\0\0\0" + bomb),
            (b"eXIf", random.randbytes(40)),
            (b"tRNS", random.randbytes(random.choice((0, 1, 2, 6, 300)))),
            (b"PLTE", random.randbytes(random.choice((0, 1, 3, 768, 999)))),
            (b"acTL", struct.pack(">II", random.choice((0, 1, 2**31)), 0)), (b"fcTL", random.randbytes(26)),
            (b"gAMA", b"\0\0\0\0"),
        ))  # fmt: skip
        chunks.insert(random.randrange(1, len(chunks)), added)
    elif step == "move":
        chunks.insert(random.randrange(len(chunks)), chunks.pop(index))
    else:
        chunks[index] = (name, mutate_bytes(content, random, [content])[0])
    body = b"".join(
        struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))
        for name, content in chunks
    )
    return data[:8] + body, f"PNG {step} {name.decode('latin-1')}"
