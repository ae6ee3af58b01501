"""Mutations of bytes, of trees of JSON and YAML, and of text; each a function of random numbers."""

import copy
import json
import math
from random import Random
from typing import Any

import yaml

_SIZES = (0, 1, 2, 3, 4, 7, 8, 16, 255, 256, 4_096, 65_535, 65_536)
_INTEGERS = (
    0,
    1,
    -1,
    2,
    127,
    128,
    255,
    256,
    32_767,
    65_535,
    2**24,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**62,
    2**63,
    2**64 - 1,
)


def mutate_bytes(data: bytes, random: Random, others: list[bytes]) -> tuple[bytes, str]:
    """One to three mutations: bits, bytes, numbers, pieces, the end, or the rest of another file."""
    steps = []
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        mutation = random.choice(_BYTES)
        data = mutation(bytearray(data), random, others)
        steps.append(mutation.__name__.strip("_"))
    return bytes(data), ", ".join(steps)


def _flip_bit(data: bytearray, random: Random, others: list[bytes]) -> bytearray:
    if data:
        data[random.randrange(len(data))] ^= 1 << random.randrange(8)
    return data


def _set_byte(data: bytearray, random: Random, others: list[bytes]) -> bytearray:
    if data:
        data[random.randrange(len(data))] = random.choice((0, 0xFF, 0x7F, 0x80, 0x20, random.randrange(256)))
    return data


def _set_number(data: bytearray, random: Random, others: list[bytes]) -> bytearray:
    """A number of 2, 4 or 8 bytes, near either end more often: there the headers and directories are."""
    width = random.choice((2, 4, 8))
    if len(data) > width:
        place = random.choice((random.randrange(min(200, len(data) - width)), random.randrange(len(data) - width)))
        if random.random() < 0.3:
            place = len(data) - width - random.randrange(min(200, len(data) - width))
        value = random.choice(_INTEGERS) % 2 ** (8 * width)
        data[place : place + width] = value.to_bytes(width, random.choice(("little", "big")))
    return data


def _insert(data: bytearray, random: Random, others: list[bytes]) -> bytearray:
    place = random.randrange(len(data) + 1)
    data[place:place] = random.randbytes(random.choice(_SIZES)) if random.random() < 0.8 else bytes(1 << 20)
    return data


def _delete(data: bytearray, random: Random, others: list[bytes]) -> bytearray:
    place = random.randrange(len(data) + 1)
    del data[place : place + random.choice(_SIZES)]
    return data


def _repeat(data: bytearray, random: Random, others: list[bytes]) -> bytearray:
    place = random.randrange(len(data) + 1)
    piece = data[place : place + random.choice(_SIZES)]
    data[place:place] = piece * random.choice((1, 2, 10))
    return data


def _exchange(data: bytearray, random: Random, others: list[bytes]) -> bytearray:
    width, first, second = random.choice(_SIZES[:11]), random.randrange(len(data) + 1), random.randrange(len(data) + 1)
    data[first : first + width], data[second : second + width] = (
        data[second : second + width],
        data[first : first + width],
    )
    return data


def _truncate(data: bytearray, random: Random, others: list[bytes]) -> bytearray:
    return data[: random.randrange(len(data) + 1)]


def _splice(data: bytearray, random: Random, others: list[bytes]) -> bytearray:
    other = random.choice(others)
    return data[: random.randrange(len(data) + 1)] + other[random.randrange(len(other) + 1) :]


_BYTES = (
    _flip_bit,
    _flip_bit,
    _set_byte,
    _set_number,
    _set_number,
    _insert,
    _delete,
    _repeat,
    _exchange,
    _truncate,
    _splice,
)

# Text that stands for values no Python value is written as; `_write` puts it where "RAWn" stands.
_RAW_JSON = (
    "[" * 100_000, "[" * 40 + "]" * 40, '{"a": ' * 2_000 + "1" + "}" * 2_000, "9" * 5_000, "-" + "9" * 400, "1e999",
    "-",
    "NaN", "-Infinity", "tru", '"\\ud800"', "'x'", "0x10", "01", '"\\u0000"', "", '{"a": 1, "a": 2}', "[1, 2,]",
    "1.5e3",
)  # fmt: skip
_RAW_YAML = (
    "[" * 5_000, "[" * 40 + "]" * 40, "{a: " * 500, "9" * 5_000, "1e999", ".nan", "-.inf",
    "!!python/object/apply:os.system [x]",
    "*a", "&a [*a]", "!!binary aGk=", "!!binary '%'", "!!set {a, b}", "!!omap [a: 1]", "!!pairs [a: 1]", "2001-01-01",
    "2001-99-99", "1:30", "0o17", "0x1F", "1_000", "~", "=", "!!int x", "!!float x", "!!null x", "!!bool x",
    "!!timestamp x",
    "{<<: {a: 1}}", "{<<: 3}", "{? [a] : 1}", "{[1, 2]: 3}", "{{a: 1}: 2}", "|\n  x", "'", '"\\x"', "\t", "%", "@", "`",
    "{1: 2}", "{null: 2}", "!<tag:yaml.org,2002:str> 3", "0b2", "1e3", "- - - x", "{a: 1, a: 2}", "!!merge x",
    "!!value x",
)  # fmt: skip
_TEXTS = (
    "", " ", "x", "0", "1", "-1", "1.5", "1e3", "true", "None", "none", "\0", "\n", "\ud800", "\ufeff", "\u202eabc",
    "\u0663",
    "\u0130", "²", "é" * 50, "a" * 100_000, "a/b", "..", "../x", "/dev/zero", "/", "~", "~nobody/x", "%s%n", "{}",
    "{0.__class__}", "\\",
    "float32", "load", "cls", "gelu", "auto", "cuda", "[1]", "https://[", "\x1b[31m",
)  # fmt: skip


def odd_value(random: Random) -> Any:
    """A value of JSON that a reader may not expect."""
    return random.choice((_odd_number, _odd_number, _odd_text, _odd_constant, _odd_collection))(random)


def _odd_number(random: Random) -> Any:
    return random.choice((
        0, 1, -1, 2, 3, 5, 7, 13, 14, 255, 1_000, 4_097, 65_536, 10**6, 2**31, 2**53, 2**63, 10**30, -(10**30),
        10**400, 0.0, -0.0, 0.5, 1.0, 1.5,
        -0.1, 1e-9, 1e-320, 1e38, 1e308, math.nan, math.inf, -math.inf, 14.0, True, False,
    ))  # fmt: skip


def _odd_text(random: Random) -> str:
    return random.choice(_TEXTS)


def _odd_constant(random: Random) -> Any:
    return random.choice((None, True, False, f"RAW{random.randrange(1_000)}"))


def _odd_collection(random: Random) -> Any:
    leaf = random.choice((_odd_number, _odd_text, _odd_constant))(random)
    return random.choice((
        [], {}, [leaf], [leaf, leaf], [leaf, leaf, leaf], [[leaf]], {"a": leaf}, {"": leaf}, {"height": leaf,
        "width": 7}, {"0": leaf},
        [0] * 1_000, {str(number): leaf for number in range(50)}, [{"a": [leaf]}], [1, 2], [20, 36], [leaf, 4],
    ))  # fmt: skip


_STEPS = ("replace", "replace", "replace", "remove", "rename", "add", "copy", "exchange", "number", "type", "nest")


def mutate_tree(tree: Any, random: Random, others: list[Any]) -> tuple[Any, str]:
    """One to three mutations of a value of JSON or YAML: its values, names, members, types and depth."""
    tree, steps = copy.deepcopy(tree), []
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        places = list(_places(tree))
        if not places or random.random() < 0.01:
            tree = odd_value(random)
            steps.append("root")
            continue
        container, key = random.choice(places)
        step = random.choice(_STEPS)
        _change(container, key, step, random, places, list(_places(random.choice(others))) or places)
        steps.append(f"{step} {str(key)[:40]!r}")
    return tree, ", ".join(steps)


def _places(tree: Any) -> Any:
    """(container, key) of every value in a tree."""
    entries = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in list(entries):
        yield tree, key
        yield from _places(value)


def _change(container: Any, key: Any, step: str, random: Random, places: list, foreign: list) -> None:
    if step == "replace":
        container[key] = odd_value(random)
    elif step == "remove":
        del container[key]
    elif step == "rename" and isinstance(container, dict):
        container[random.choice((f"{key}s", str(key).upper(), f"_{key}", _odd_text(random)))] = container.pop(key)
    elif step == "add":
        if isinstance(container, dict):
            container[random.choice(("unknown", "_unknown", "auto_map", "dtype", "name", _odd_text(random)))] = (
                odd_value(random)
            )
        else:
            container.insert(key, odd_value(random))
    elif step == "type":
        container[key] = random.choice(_in_other_types(container[key]))
    elif step == "nest":
        for _ in range(random.choice((1, 1, 2, 20, 60))):
            container[key] = random.choice(([container[key]], {"a": container[key]}))
    elif step == "number" and isinstance(container[key], int | float):
        value = container[key]
        more = (
            value + 1,
            -value,
            value * 1_000,
            value // 2,
            value * 0.5 if abs(value) < 2**60 else 0.5,
            str(value)[:99],
        )
        container[key] = random.choice(more)
    else:
        other, name = random.choice(foreign if step == "copy" else places)
        container[key] = copy.deepcopy(other[name]) if other is not container[key] else None


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


def write_json(tree: Any, random: Random) -> bytes:
    """The text of a tree, now and then in another encoding, or with a byte mutated."""
    text = _place_raw(json.dumps(tree, ensure_ascii=random.random() < 0.5, indent=random.choice((None, 2))), _RAW_JSON)
    return _encode(text, random)


def write_yaml(tree: Any, random: Random) -> bytes:
    """As `write_json`; the text of YAML."""
    try:
        text = yaml.safe_dump(tree, default_flow_style=random.choice((None, True, False)), sort_keys=False)
    except (yaml.YAMLError, TypeError):  # names that cannot be sorted or written
        text = json.dumps(tree)
    return _encode(_place_raw(text, _RAW_YAML), random)


def _place_raw(text: str, raw: tuple[str, ...]) -> str:
    while "RAW" in text:
        before, after = text.split("RAW", 1)
        digits = after[: len(after) - len(after.lstrip("0123456789"))]
        value = raw[int(digits or 0) % len(raw)]
        quoted = before.endswith('"') and after[len(digits) :].startswith('"')
        text = before[:-1] + value + after[len(digits) + 1 :] if quoted else before + value + after[len(digits) :]
    return text


def _encode(text: str, random: Random) -> bytes:
    encoding = random.choice(("utf-8",) * 20 + ("utf-8-sig", "utf-16", "latin-1", "utf-32"))
    data = text.encode(encoding, "surrogatepass" if "utf" in encoding else "replace")
    return mutate_bytes(data, random, [data])[0] if random.random() < 0.1 else data


def mutate_lines(text: str, random: Random) -> tuple[str, str]:
    """One to three mutations of lines of text."""
    lines, steps = text.split("\n"), []
    for _ in range(random.choice((1, 1, 2, 3))):
        place = random.randrange(len(lines))
        step = random.choice(("replace", "remove", "repeat", "insert", "join", "append"))
        if step == "replace":
            lines[place] = _odd_text(random)
        elif step == "remove" and len(lines) > 1:
            del lines[place]
        elif step == "insert":
            lines.insert(place, _odd_text(random))
        elif step == "append":
            lines[place] += random.choice(("\r", "\0", "\x85", "\u2028", ",", '"', "\t", _odd_text(random)))
        elif step == "join" and place:
            lines[place - 1 : place + 1] = [lines[place - 1] + lines[place]]
        else:
            lines.insert(place, lines[random.randrange(len(lines))])
        steps.append(step)
    return "\n".join(lines), ", ".join(steps)


def encode_lines(text: str, random: Random) -> bytes:
    """The bytes of a text, now and then in another encoding, or mutated themselves."""
    return _encode(text, random)
