"""Error budget from the bytes of JPEG files to logits: what each part of the way changes.

    python benchmarks/error_budget.py SHARED               # prints tables, and writes results/error_budget.json
    python benchmarks/error_budget.py SHARED --only int8   # measures these rows; the others keep their results

SHARED has the 104 photographs (data/imagenet_sample/images.zip), ViT-Ti/16 (weights/) and what the original code
computes from these files in float64 (goldens/bytes.npz), for the presets vit_jax and augreg. The original's logits are
the reference for these two; for the preset timm it is this package in float64.

A row changes one thing of the package's usual way: the preset, its decoder, float32, eager PyTorch.
"""

import argparse
import copy
import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageClassification
from transformers.activations import ACT2FN

import hf_vit
from hf_vit.conversion import convert

PRESETS = ("vit_jax", "augreg", "timm")
BATCH = 26
RESULTS = Path(__file__).parent / "results" / "error_budget.json"


def logits_of(model: Any, pixel_values: torch.Tensor) -> np.ndarray:
    """Return the logits (images, 1000) in float64; the model computes in the dtype of the pixel values."""
    with torch.inference_mode():
        parts = [model(pixel_values=part).logits.double().numpy() for part in pixel_values.split(BATCH)]
    return np.concatenate(parts)


def with_exact_gelu(model: Any) -> Any:
    """Return a copy whose GELU is the exact one, as in PyTorch by default; the original's is the tanh approximation."""
    changed = copy.deepcopy(model)
    tanh = type(ACT2FN["gelu_pytorch_tanh"])
    found = 0
    for module in list(changed.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, tanh):
                setattr(module, name, torch.nn.GELU())
                found += 1
    if found != model.config.num_hidden_layers:
        raise ValueError(f"{found} activations were replaced, of {model.config.num_hidden_layers} layers")
    return changed


def measure(
    preset: str, files: list[bytes], weights: Path, reference: np.ndarray | None, work: Path, only: str
) -> dict[str, Any]:
    """Return the rows of a preset: largest and median difference of a logit, and changed predictions.

    Args:
        only: a text in the names of the rows to measure.
    """
    folder = work / preset
    convert(weights, preset=preset).save(folder)
    model, processor = hf_vit.load(folder)
    inputs = processor(files, return_tensors="pt").pixel_values

    def in_float64() -> np.ndarray:
        return logits_of(copy.deepcopy(model).double(), inputs.double())

    reference = in_float64() if reference is None else reference.astype(np.float64)
    other = {"fast": "accurate", "accurate": "fast"}[processor.jpeg_dct]
    decoded = [Image.open(io.BytesIO(data)).convert("RGB") for data in files]
    other_preset = "transformers" if preset != "transformers" else "timm"

    def with_settings(images: Any, **settings: Any) -> np.ndarray:
        return logits_of(model, processor(images, return_tensors="pt", **settings).pixel_values)

    def for_transformers() -> np.ndarray:
        convert(weights, preset=preset).save(work / f"{preset}_transformers", save_for="transformers")
        theirs = AutoModelForImageClassification.from_pretrained(work / f"{preset}_transformers").eval()
        its_processor = AutoImageProcessor.from_pretrained(work / f"{preset}_transformers")
        return logits_of(theirs, its_processor(decoded, return_tensors="pt").pixel_values)

    def backend(name: str) -> np.ndarray:
        program = hf_vit.use_backend(copy.deepcopy(model), name, batch_size=BATCH)
        return logits_of(program, inputs)

    def int8() -> np.ndarray:
        """Calibrated with the same photographs."""
        photographs = work / "photographs"
        photographs.mkdir(exist_ok=True)
        for number, data in enumerate(files):
            (photographs / f"{number}.jpg").write_bytes(data)
        hf_vit.quantize(folder, work / f"{preset}_int8", [photographs], min_agreement=0.5)
        return logits_of(hf_vit.load(work / f"{preset}_int8")[0], inputs)

    rows: dict[str, Callable[[], np.ndarray]] = {
        "as it is: files, float32": lambda: logits_of(model, inputs),
        "float64": in_float64,
        "bfloat16": lambda: logits_of(copy.deepcopy(model).bfloat16(), inputs.bfloat16()),
        f"JPEG decoder: {other}": lambda: with_settings(files, jpeg_dct=other),
        "decoded PIL images, as in transformers' pipeline": lambda: with_settings(decoded),
        f"resize of the preset {other_preset}": lambda: with_settings(
            files, preset=other_preset, jpeg_dct=processor.jpeg_dct
        ),
        "exact GELU": lambda: logits_of(with_exact_gelu(model), inputs),
        "ONNX Runtime": lambda: backend("onnxruntime"),
        "OpenVINO": lambda: backend("openvino"),
        "OpenVINO, int8 (`hf-vit quantize`)": int8,
        "folder for transformers, read by its classes": for_transformers,
    }
    found = {}
    for name, compute in rows.items():
        if only not in name:
            continue
        logits = compute()
        difference = np.abs(logits - reference)
        found[name] = {
            "largest": float(difference.max()),
            "median": float(np.median(difference)),
            "changed": int((logits.argmax(axis=1) != reference.argmax(axis=1)).sum()),
        }
        print(f"{preset:8} {name:50} {found[name]}", flush=True)
    return found


def as_table(rows: dict[str, Any], count: int) -> str:
    lines = [
        "| what differs | largest difference of a logit | median | changed predictions |",
        "| --- | --: | --: | --: |",
    ]
    for name, row in rows.items():
        lines.append(f"| {name} | {row['largest']:.1e} | {row['median']:.1e} | {row['changed']} of {count} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("shared", type=Path, help="folder with data/, weights/ and goldens/")
    parser.add_argument("--only", default="", metavar="TEXT", help="measure only the rows with this text in their name")
    arguments = parser.parse_args()
    shared = arguments.shared
    before = json.loads(RESULTS.read_text())["presets"] if arguments.only else {}
    golden = np.load(shared / "goldens" / "bytes.npz")
    with zipfile.ZipFile(shared / "data" / "imagenet_sample" / "images.zip") as archive:
        members = {name.split("/")[-1]: name for name in archive.namelist()}
        files = [archive.read(members[name]) for name in golden["names"]]
    weights = shared / "weights" / "Ti_16-imagenet2012-res_224.npz"
    found = {}
    with TemporaryDirectory() as work:
        for preset in PRESETS:
            reference = golden[preset] if preset in golden.files else None
            rows = measure(preset, files, weights, reference, Path(work), arguments.only)
            found[preset] = before.get(preset, {}) | rows
    RESULTS.write_text(json.dumps({"images": len(files), "presets": found}, indent=2) + "\n")
    for preset, rows in found.items():
        print(f"\n## {preset}\n\n{as_table(rows, len(files))}")


if __name__ == "__main__":
    main()
