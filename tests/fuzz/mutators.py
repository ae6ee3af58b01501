"""Mutations of bytes, of trees of JSON and YAML, of named records and of text; each a function of random numbers."""

import copy
import json
import math
import re
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import yaml

_SIZES = (0, 1, 2, 3, 4, 7, 8, 16, 255, 256, 4_096, 65_535, 65_536)
_INTEGERS = (
    0, 1, -1, 2, 7, 127, 128, 255, 256, 32_767, 65_535, 65_536, 2**24, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63,
    2**64 - 1,
)  # fmt: skip
_COUNTS = (1, 1, 1, 2, 3)  # of mutations
_BYTE_STEPS = ("bit", "bit", "byte", "number", "number", "insert", "delete", "repeat", "exchange", "truncate", "splice")


def mutate_bytes(data: bytes, random: Random, others: Sequence[bytes] = ()) -> bytes:
    """One to three mutations: bits, bytes, numbers, pieces, the end, or the rest of another file."""
    changed = bytearray(data)
    for _ in range(random.choice(_COUNTS)):
        _change_bytes(changed, random, others)
    return bytes(changed)


def _change_bytes(data: bytearray, random: Random, others: Sequence[bytes]) -> None:
    step, place, size = random.choice(_BYTE_STEPS), random.randrange(len(data) + 1), random.choice(_SIZES)
    if step == "bit" and data:
        data[random.randrange(len(data))] ^= 1 << random.randrange(8)
    elif step == "byte" and data:
        data[random.randrange(len(data))] = random.choice((0, 0xFF, 0x7F, 0x80, 0x20, random.randrange(256)))
    elif step == "number":
        _set_number(data, random)
    elif step == "insert":
        data[place:place] = random.randbytes(size) if random.random() < 0.8 else bytes(1 << 20)
    elif step == "delete":
        del data[place : place + size]
    elif step == "repeat":
        data[place:place] = data[place : place + size] * random.choice((1, 2, 10))
    elif step == "exchange":
        other, size = random.randrange(len(data) + 1), min(size, 4_096)
        data[place : place + size], data[other : other + size] = data[other : other + size], data[place : place + size]
    elif step == "truncate":
        del data[place:]
    elif step == "splice":
        other = random.choice(others or [data])
        data[place:] = other[random.randrange(len(other) + 1) :]


def _set_number(data: bytearray, random: Random) -> None:
    """Set 2, 4 or 8 bytes, near either end more often: there the headers and directories are."""
    width = random.choice((2, 4, 8))
    if (last := len(data) - width) > 0:
        place = random.choice((random.randrange(min(200, last)), random.randrange(last)))
        if random.random() < 0.3:
            place = last - random.randrange(min(200, last))
        value = random.choice(_INTEGERS) % 2 ** (8 * width)
        data[place : place + width] = value.to_bytes(width, random.choice(("little", "big")))


Records = list[tuple[str, bytes]]
_RECORD_STEPS = ("content",) * 6 + ("remove", "rename", "repeat", "move", "replace", "insert", "insert")


def mutate_records(
    records: Records, random: Random, names: Sequence[str], added: Sequence[bytes] = (), change: Callable = mutate_bytes
) -> Records:
    """One to three mutations of named pieces: members of an archive, chunks of an image, files of a folder.

    Args:
        names: what a piece is called that is added or renamed.
        added: contents of a piece that is added or replaced.
        change: mutates the content of a piece.
    """
    records = list(records)
    for _ in range(random.choice(_COUNTS)):
        index, (other_name, other_content) = random.randrange(len(records)), random.choice(records)
        name, content = records[index]
        odd = random.choice(
            (other_content, other_content, *added, b"", b"{}", b"null", bytes(99), random.randbytes(50))
        )
        step = random.choice(_RECORD_STEPS)
        if step == "content":
            records[index] = name, change(content, random)
        elif step == "remove" and len(records) > 1:
            del records[index]
        elif step == "rename":
            records[index] = random.choice((*names, f"{name}x", name.upper(), f"{name}/0", other_name)), content
        elif step == "repeat":
            records[index:index] = [records[index]] * random.choice((1, 2, 1_000))
        elif step == "move":
            records.insert(random.randrange(len(records)), records.pop(index))
        elif step == "replace":
            records[index] = name, odd
        else:
            records.insert(index, (random.choice(names), odd))
    return records


# Text that stands for values no Python value is written as; `_place_raw` puts it where "RAWn" stands.
_RAW_JSON = (
    "[" * 100_000, "[" * 40 + "]" * 40, '{"a": ' * 2_000 + "1" + "}" * 2_000, "9" * 5_000, "-" + "9" * 400, "1e999",
    "-", "NaN", "-Infinity", "tru", '"\\ud800"', "'x'", "0x10", "01", '"\\u0000"', "", '{"a": 1, "a": 2}', "[1, 2,]",
    "1.5e3",
)  # fmt: skip
_RAW_YAML = (
    "[" * 5_000, "[" * 40 + "]" * 40, "{a: " * 500, "9" * 5_000, "1e999", ".nan", "-.inf", "*a", "&a [*a]",
    "!!python/object/apply:os.system [x]", "!!binary aGk=", "!!binary '%'", "!!set {a, b}", "!!omap [a: 1]",
    "!!pairs [a: 1]", "2001-01-01", "2001-99-99", "1:30", "0o17", "0x1F", "1_000", "~", "=", "!!int x", "!!float x",
    "!!null x", "!!bool x", "!!timestamp x", "{<<: {a: 1}}", "{<<: 3}", "{? [a] : 1}", "{[1, 2]: 3}", "{{a: 1}: 2}",
    "|\n  x", "'", '"\\x"', "\t", "%", "@", "`", "{1: 2}", "{null: 2}", "!<tag:yaml.org,2002:str> 3", "0b2", "1e3",
    "- - - x", "{a: 1, a: 2}", "!!merge x", "!!value x",
)  # fmt: skip
_TEXTS = (
    "", " ", "x", "0", "1", "-1", "1.5", "1e3", "true", "None", "none", "\0", "\n", "\ud800", "\ufeff", "\u202eabc",
    "\u0663", "\u0130", "²", "é" * 50, "a" * 100_000, "a/b", "..", "../x", "/dev/zero", "/", "~", "~nobody/x", "%s%n",
    "{}", "{0.__class__}", "\\", "float32", "load", "cls", "gelu", "auto", "cuda", "[1]", "https://[", "\x1b[31m",
)  # fmt: skip
_NUMBERS = (
    0, 1, -1, 2, 3, 5, 7, 13, 14, 255, 1_000, 4_097, 65_536, 10**6, 2**31, 2**53, 2**63, 10**30, -(10**30), 10**400,
    0.0, -0.0, 0.5, 1.0, 1.5, -0.1, 1e-9, 1e-320, 1e38, 1e308, math.nan, math.inf, -math.inf, 14.0, True, False,
)  # fmt: skip


def odd_value(random: Random) -> Any:
    """A value of JSON that a reader may not expect."""
    constant = random.choice((None, True, False, f"RAW{random.randrange(1_000)}"))
    leaf = random.choice((random.choice(_NUMBERS), random.choice(_NUMBERS), random.choice(_TEXTS), constant))
    if random.random() < 0.8:
        return leaf
    return random.choice((
        [], {}, [leaf], [leaf, leaf], [leaf, leaf, leaf], [[leaf]], {"a": leaf}, {"": leaf}, {"0": leaf}, [0] * 1_000,
        {"height": leaf, "width": 7}, {str(number): leaf for number in range(50)}, [{"a": [leaf]}], [1, 2], [20, 36],
        [leaf, 4],
    ))  # fmt: skip


_ENDIAN = {"name": "bytes", "configuration": {"endian": "little"}}
_SHARDING = {"chunk_shape": [1], "codecs": [_ENDIAN], "index_codecs": [_ENDIAN, {"name": "crc32c"}]}
_SHARDS = [{"name": "sharding_indexed", "configuration": _SHARDING}]
_SHAPES = ("shape", "chunks", "chunk_shape", "data_offsets")
# What fields of these names say of arrays in .npy, safetensors, flax's msgpack, zarr 2 and zarr 3.
_FIELDS: dict[str, tuple[Any, ...]] = {
    "dtype": (
        "F64", "F16", "BF16", "I8", "BOOL", "U8", "F8_E4M3", "C64", "f32", "float16", "bfloat16", "float64", "int8",
        "bool", "complex64", "object", "O", "float32,float32", "V2", "<f4", "<f8", ">f4", "<f2", "|V2", "<c8", "|b1",
        "<i8", "|O", "<U4", [["a", "<f4"]], "<M8[s]", "",
    ),
    "descr": (
        "|O", "<f4x", "f4", ("<f4", (2,)), [("a", "<f4")], "<f999", "|V0", "<U0", 3, "<i4", "<f8", "V2", "|V4", None,
        ">f4", "<f2", "<c8", "|S3", "<M8[s]",
    ),
    "fortran_order": (True, 1, "x", None),
    "version": (2, 3, 0, 255),
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
}  # fmt: skip


def _odd_field(name: Any, value: Any, random: Random) -> Any:
    """A value of a field: sizes that an array does not have or that no array has, another type, or anything."""
    if name in _SHAPES and random.random() < 0.8:
        sizes = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        shape = [size for size in sizes if isinstance(size, int)] or [7]
        return random.choice((
            shape[::-1], [math.prod(shape)], [*shape, 1], [1, *shape], shape[:-1], [], [0], [0, *shape], [-1, *shape],
            [-size for size in shape], [size + 1 for size in shape], [size - 4 for size in shape], [2**31], [2**63],
            [size * 2**20 for size in shape], [*shape[:-1], shape[-1] + 4], [2**40, 2**40], [2**62] * 4, [10**400],
            [0, 2**62], [2**20] * 3, [1] * 40, [1.5], ["7"], [None], [[7]], [True], "x", None, {"0": 7},
        ))  # fmt: skip
    if name in _FIELDS and random.random() < 0.8:
        return random.choice(_FIELDS[name])
    return odd_value(random)


_TREE_STEPS = ("replace",) * 4 + ("edit", "edit", "remove", "rename", "add", "copy", "exchange", "type", "nest")


def mutate_tree(tree: Any, random: Random, others: Sequence[Any] = ()) -> Any:
    """One to three mutations of lists and dictionaries: values, names, members, types and depth.

    Args:
        others: trees to copy from; by default the tree itself.
    """
    tree = copy.deepcopy(tree)
    for _ in range(random.choice(_COUNTS)):
        places = list(_places(tree))
        if places and random.random() < 0.99:
            foreign = list(_places(random.choice(others or [tree]))) or places
            _change_value(*random.choice(places), random, places, foreign)
        else:
            tree = odd_value(random)
    return tree


def _places(tree: Any) -> Any:
    """(container, key) of every value in a tree."""
    entries = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in list(entries):
        yield tree, key
        yield from _places(value)


def _change_value(container: Any, key: Any, random: Random, places: list, foreign: list) -> None:
    value, step = container[key], random.choice(_TREE_STEPS)
    if step == "replace":
        container[key] = _odd_field(key, value, random)
    elif step == "edit" and isinstance(value, str | bytes | int | float):
        container[key] = _edited(value, random)
    elif step == "remove":
        del container[key]
    elif step == "rename" and isinstance(container, dict):
        name = random.choice((f"{key}s", str(key).upper(), f"_{key}", f"{key}/more", "a/b", random.choice(_TEXTS)))
        container[name] = container.pop(key)
    elif step == "add" and isinstance(container, dict):
        name = random.choice(("unknown", "_unknown", "auto_map", "name", random.choice(_TEXTS), *_FIELDS))
        container[name] = _odd_field(name, None, random)
    elif step == "add":
        container.insert(key, odd_value(random))
    elif step == "type":
        container[key] = random.choice(_in_other_types(value))
    elif step == "nest":
        for _ in range(random.choice((1, 1, 2, 20, 60))):
            container[key] = random.choice(([container[key]], {"a": container[key]}))
    else:
        other, name = random.choice(foreign if step == "copy" else places)
        container[key] = copy.deepcopy(other[name]) if other is not value else None


def _edited(value: Any, random: Random) -> Any:
    """Text with one more character, bytes with mutations or a number that is not finite, or another number."""
    if isinstance(value, str):
        return value + random.choice(("\r", "\0", "\x85", "\u2028", "\n", ",", '"', "\t", random.choice(_TEXTS)))
    if isinstance(value, bytes):
        place = 4 * random.randrange(len(value) // 4 + 1)
        odd = random.choice((b"\0\0\xc0\x7f", b"\0\0\x80\xff", b"\xca\xf2\x49\x71", bytes(4)))  # NaN, -inf, 1e30, 0
        is_number = random.random() < 0.5 and place < len(value)
        return value[:place] + odd + value[place + 4 :] if is_number else mutate_bytes(value, random)
    half = value * 0.5 if abs(value) < 2**60 else 0.5
    return random.choice((value + 1, -value, value * 1_000, value // 2, half, str(value)[:99]))


def _in_other_types(value: Any) -> list[Any]:
    """The same content as text, as a list, as an object, as a number."""
    others: list[Any] = [str(value)[:1_000], [value], {"value": value}]
    if isinstance(value, dict):
        others += [list(value), list(value.values()), [[name, member] for name, member in value.items()]]
    elif isinstance(value, list):
        others += [{str(number): member for number, member in enumerate(value)}, value[0] if value else None]
    elif isinstance(value, int | float):
        others += [bool(value), float(value) if abs(value) < 1e300 else 0.0]
    return others


def mutate_json(text: bytes, random: Random, others: Sequence[Any] = ()) -> bytes:
    """JSON of which values or, more rarely, bytes were mutated; `others` are trees to copy from."""
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError):  # was mutated before
        return mutate_bytes(text, random)
    if random.random() < 0.2:
        return mutate_bytes(text, random, [text, *(json.dumps(other).encode() for other in others)])
    return write_json(mutate_tree(tree, random, others), random)


def mutate_lines(text: str, random: Random) -> bytes:
    tree = mutate_tree(text.split("\n"), random)
    return encode("\n".join(map(str, tree if isinstance(tree, list) else [tree])), random)


def write_json(tree: Any, random: Random) -> bytes:
    """The text of a tree, now and then in another encoding, or with a byte mutated."""
    text = json.dumps(tree, ensure_ascii=random.random() < 0.5, indent=random.choice((None, 2)))
    return encode(_place_raw(text, _RAW_JSON), random)


def write_yaml(tree: Any, random: Random) -> bytes:
    """As `write_json`; the text of YAML."""
    try:
        text = yaml.safe_dump(tree, default_flow_style=random.choice((None, True, False)), sort_keys=False)
    except (yaml.YAMLError, TypeError):  # names that cannot be sorted or written
        text = json.dumps(tree)
    return encode(_place_raw(text, _RAW_YAML), random)


def _place_raw(text: str, raw: Sequence[str]) -> str:
    return re.sub(r'"RAW(\d+)"|RAW(\d+)', lambda found: raw[int(found[1] or found[2]) % len(raw)], text)


def encode(text: str, random: Random) -> bytes:
    """The bytes of a text, now and then in another encoding, or mutated themselves."""
    encoding = random.choice(("utf-8",) * 20 + ("utf-8-sig", "utf-16", "latin-1", "utf-32"))
    data = text.encode(encoding, "surrogatepass" if "utf" in encoding else "replace")
    return mutate_bytes(data, random) if random.random() < 0.1 else data
