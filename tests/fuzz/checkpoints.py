"""Kinds of weights: .npz, .pth and .safetensors that are converted, and the .safetensors of a folder that is loaded."""

import hashlib
import io
import json
from collections.abc import Iterable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save

from hf_vit.conversion.converting import convert
from hf_vit.loading import load

from ..paths import GOLDENS, PEERS
from ..tiny_models import save_tiny
from .archives import mutate_directory, mutate_safetensors, odd_pth, rewrite_npz, rewrite_pth
from .gate import OUTPUT, Case, Kind, write_files
from .mutators import mutate_bytes

Tensors = dict[str, torch.Tensor]


def fingerprint(tensors: Tensors) -> str:
    """A hash of tensors, their names and shapes."""
    return hashlib.sha256(save({name: tensor.contiguous() for name, tensor in tensors.items()})).hexdigest()


class Conversion(Kind):
    """A checkpoint that `convert` makes a folder of; the result is the folder's arrays and record."""

    file: str
    folder: Path = PEERS  # of the originals
    arguments: dict[str, dict[str, Any]]  # of `convert`, by the names of the originals

    def prepare(self, folder: Path) -> None:
        self.originals = {name: self.content(name) for name in self.arguments}
        self.whole = []
        for name, content in self.originals.items():
            case = self.case(name, content)
            write_files(case, folder / name)
            self.whole.append(fingerprint(self.use(case, folder / name)["arrays"]))

    def content(self, name: str) -> bytes:
        return (self.folder / name).read_bytes()

    def case(self, name: str, data: bytes, expected: str = "any") -> Case:
        return Case(name, {self.file: data}, self.arguments[name], expected)

    def use(self, case: Case, folder: Path) -> Any:
        convert(folder / self.file, read_weights=False, **case.value).save(folder / OUTPUT)
        record = json.loads((folder / OUTPUT / "conversion.json").read_text(encoding="utf-8"))
        return {"arrays": load_file(folder / OUTPUT / "model.safetensors"), "record": record}

    def judge(self, case: Case, result: Any) -> str | None:
        arrays = result["arrays"]
        if any(not tensor.isfinite().all() for tensor in arrays.values()):
            return "the weights are not finite"
        if case.expected == "same" and fingerprint(arrays) not in self.whole:
            return "the weights are not those of any original, and its checksums deny others"
        return None if case.expected == "same" else self.compare(case, result)

    def compare(self, case: Case, result: Any) -> str | None:
        """What an independent reader of the file says."""
        return None


def floats(array: np.ndarray) -> np.ndarray:
    """Numbers in one row; bfloat16, which NumPy does not know, is the upper half of a float32."""
    if array.dtype.kind == "V":
        return (np.frombuffer(array.tobytes(), "<u2").astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32).ravel()


def other_numbers(ours: Tensors, theirs: Iterable[np.ndarray]) -> str | None:
    """What is wrong where two readers do not find the same numbers, but for zeros and their order."""
    first = np.sort(np.concatenate([tensor.numpy().ravel() for tensor in ours.values()]))
    second = np.sort(np.concatenate([floats(array) for array in theirs]))
    is_same = np.array_equal(first[first != 0], second[second != 0], equal_nan=True)
    return None if is_same else "another reader finds other numbers in the file"


class Npz(Conversion):
    """Read by NumPy too, which must find the same numbers."""

    name = "npz"
    file = "input.npz"
    folder = GOLDENS
    arguments = {  # noqa: RUF012
        **{f"{name}.npz": {} for name in ("vit_token", "vit_gap", "vit_nohead", "vit_token_rep", "bv_scan_params")},
        **{f"{name}.npz": {} for name in ("bv_sincos", "bv_map", "bit_v1")},
        "vit_linen.npz": {"position_grid": (2, 4)},
    }

    def prepare(self, folder: Path) -> None:
        super().prepare(folder)
        self.arrays = {name: dict(np.load(io.BytesIO(content))) for name, content in self.originals.items()}

    def make(self, random: Random) -> Case:
        name = random.choice(list(self.originals))
        data, way = self.originals[name], random.random()
        if way < 0.4:
            return self.case(name, rewrite_npz(self.arrays[name], random))
        if way < 0.55:
            return self.case(name, mutate_directory(data, random), "same")
        return self.case(name, mutate_bytes(data, random, list(self.originals.values())), "same")

    def compare(self, case: Case, result: Any) -> str | None:
        prefix, dropped = result["record"]["dialect"].get("prefix", ""), result["record"]["dropped"]
        with np.load(io.BytesIO(case.files[self.file])) as file:
            names = [name for name in file.files if name.startswith(prefix) and not (dropped and "head/" in name)]
            return other_numbers(result["arrays"], [file[name] for name in names])


class Pth(Conversion):
    name = "pth"
    file = "input.pth"
    arguments = {  # noqa: RUF012
        "deit.pth": {"num_attention_heads": 2, "position_grid": (5, 9)},
        "dino.pth": {"num_attention_heads": 2, "position_grid": (5, 9)},
        "torchvision.pth": {"num_attention_heads": 2},
        "legacy": {"num_attention_heads": 2, "position_grid": (5, 9)},
    }

    def content(self, name: str) -> bytes:
        if name != "legacy":
            return super().content(name)
        file = io.BytesIO()
        torch.save(_weights(PEERS / "deit.pth"), file, _use_new_zipfile_serialization=False)
        return file.getvalue()

    def prepare(self, folder: Path) -> None:
        super().prepare(folder)
        self.weights = {name: _weights(io.BytesIO(content)) for name, content in self.originals.items()}

    def make(self, random: Random) -> Case:
        name = random.choice(list(self.originals))
        data, way = self.originals[name], random.random()
        if way < 0.3:
            return self.case(name, odd_pth(self.weights[name], random))
        if name == "legacy":
            return self.case(name, mutate_bytes(data, random, list(self.originals.values())))
        if way < 0.5:
            return self.case(name, rewrite_pth(data, random))
        if way < 0.6:
            return self.case(name, mutate_directory(data, random), "same")
        return self.case(name, mutate_bytes(data, random), "same")


def _weights(file: Any) -> Tensors:
    content = torch.load(file, weights_only=False)
    for container in ("model", "teacher"):
        content = content.get(container, content)
    return {name: value for name, value in content.items() if isinstance(value, torch.Tensor)}


class Safetensors(Conversion):
    """It has no checksums: the numbers must be those that its header and data say."""

    name = "safetensors"
    file = "input.safetensors"
    arguments = {  # noqa: RUF012
        "timm_plain.safetensors": {"num_attention_heads": 2, "position_grid": (5, 9)},
        "timm_map.safetensors": {"num_attention_heads": 2, "position_grid": (5, 9)},
        "timm_root.safetensors": {"num_attention_heads": 2},
        "timm_hybrid.safetensors": {"num_attention_heads": 2, "position_grid": (3, 5)},
    }

    def make(self, random: Random) -> Case:
        name = random.choice(list(self.originals))
        return self.case(name, mutate_safetensors(self.originals[name], random, list(self.originals.values())))

    def compare(self, case: Case, result: Any) -> str | None:
        return (
            None if result["record"]["other_parts"] else _compare_safetensors(result["arrays"], case.files[self.file])
        )


def _compare_safetensors(ours: Tensors, data: bytes) -> str | None:
    """Read floats as https://github.com/huggingface/safetensors describes the format; other types are not compared."""
    length = int.from_bytes(data[:8], "little")
    header, arrays = json.loads(data[8 : 8 + length]), []
    header.pop("__metadata__", None)
    for entry in header.values():
        if isinstance(entry, list):  # safetensors reads the fields of an entry in this order too
            entry = dict(zip(("dtype", "shape", "data_offsets"), entry, strict=False))
        dtype = {"F16": "<f2", "F32": "<f4", "F64": "<f8"}.get(entry["dtype"])
        if dtype is None:
            return None
        start, end = entry["data_offsets"]
        arrays.append(np.frombuffer(data[8 + length + start : 8 + length + end], dtype))
    return other_numbers(ours, arrays)


class Weights(Kind):
    """The model.safetensors, or pytorch_model.bin, of a folder of ours, which `load` reads."""

    name = "weights"

    def prepare(self, folder: Path) -> None:
        variants: tuple[dict[str, Any], ...] = ({}, {"pooling": "map", "representation_size": 9}, {"hybrid": True})
        folders = [save_tiny(folder / str(number), **fields) for number, fields in enumerate(variants)]
        self.folders = [{path.name: path.read_bytes() for path in place.iterdir()} for place in folders]
        self.originals = [files.pop("model.safetensors") for files in self.folders]
        file = io.BytesIO()
        torch.save(load_file(folders[0] / "model.safetensors"), file)
        self.pickled = file.getvalue()

    def make(self, random: Random) -> Case:
        if random.random() < 0.25:
            data = random.choice((mutate_bytes, rewrite_pth))(self.pickled, random)
            return Case("pickle", {**self.folders[0], "pytorch_model.bin": data})
        number = random.randrange(len(self.folders))
        data = mutate_safetensors(self.originals[number], random, self.originals)
        return Case(str(number), {**self.folders[number], "model.safetensors": data})

    def use(self, case: Case, folder: Path) -> Any:
        return load(folder)[0].state_dict()

    def judge(self, case: Case, result: Any) -> str | None:
        weights = case.files.get("model.safetensors")
        return None if weights is None else _compare_safetensors(result, weights)
