"""A classifier as a static web page, which computes in the visitor's browser; transformers.js loads the same folder.

| file | content |
| --- | --- |
| index.html, page.js, worker.js, service-worker.js, styles.css | the page |
| page.json | the models and their preprocessing, as the page needs them |
| onnx/model.onnx | the program of `any_size`, for levels in float32 |
| onnx/model_fp16.onnx | its weights in float16, computed in float32 |
| onnx/model_quantized.onnx | its weights in int8 with a scale for each output, computed in float32 |
| config.json, preprocessor_config.json | as transformers.js reads them; the program does the preprocessing |
| runtime/ | ONNX Runtime's web assembly |
"""

import math
import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub import cached_assets_path

from ..conversion.tables import ConversionError
from ..files.manifest import sha256_of
from ..files.output import check_no_model, new_folder, refuse_existing, write_json
from ..files.versions import require
from ..models.scores import score_function, stored_thresholds
from ..models.sizes import as_pair
from .any_size import check_any_size_onnx, make_any_size_onnx

_RUNTIME = "onnxruntime-web@1.30.0"  # of npm, MIT license
_RUNTIME_SHA256 = "d2228df7e4616bc3348bf504ee888f3bec43789a273f0a63f3e68d203ce3bf71"
_ASSEMBLY = "ort-wasm-simd-threaded.wasm"
_RUNTIME_FILES = ("ort.wasm.bundle.min.mjs", _ASSEMBLY)
_PAGE_FILES = ("index.html", "page.js", "worker.js", "service-worker.js", "styles.css")
_LEAST_VALUES = 1024  # smaller constants stay in float32


def write_web_page(
    folder: str | os.PathLike,
    models: Mapping[str, tuple[Any, Any]],
    *,
    examples: Sequence[Path] = (),
    credits: str = "",
    runtime: str | os.PathLike | None = None,
    overwrite: bool = False,
) -> None:
    """Write the folder that this module describes, with one or several models.

    Args:
        folder: the folder to write; it appears when it is complete.
        models: name on the page -> (model, image processor); classifiers of images with 1 or 3 channels, on the CPU.
            The files of all but the first are in folders, "model2/" and so on.
        examples: pictures that a visitor can choose; copied into the folder.
        credits: text about the examples.
        runtime: the npm package onnxruntime-web, as a folder or a .tgz; by default npm downloads version 1.30.0 once
            into the cache.
        overwrite: replace an existing folder.

    Raises:
        ConversionError: a model or its preprocessing is not supported, or there is no such package.
        FileExistsError: `folder` exists and may not be overwritten, or holds a model.
        ImportError: the extra `export` is not installed.
    """
    refuse_existing(folder, overwrite)
    check_no_model(folder)
    require("onnx", "onnxscript")
    runtime = find_runtime() if runtime is None else Path(runtime)
    with new_folder(folder, overwrite) as draft:
        _copy_runtime(runtime, draft / "runtime")
        assembly = {"file": f"runtime/{_ASSEMBLY}", "bytes": (draft / "runtime" / _ASSEMBLY).stat().st_size}
        for file in _PAGE_FILES:
            (draft / file).write_bytes(files("hf_vit.runtimes").joinpath("web_page", file).read_bytes())
        entries = []
        for number, (name, (model, processor)) in enumerate(models.items(), start=1):
            subfolder = "" if number == 1 else f"model{number}/"
            entry = _write_model(draft / subfolder, model, processor)
            entries.append({"name": name, "folder": subfolder, "runtime": assembly, **entry})
        for example in examples:
            (draft / "examples").mkdir(exist_ok=True)
            shutil.copyfile(example, draft / "examples" / example.name)
        shown = [f"examples/{example.name}" for example in examples]
        write_json(draft / "page.json", {"models": entries, "examples": shown, "credits": credits})


def _write_model(folder: Path, model: Any, processor: Any) -> dict[str, Any]:
    """Write the programs of a model and the files of transformers.js; return its entry of page.json."""
    config = model.config
    if config.num_channels not in (1, 3):
        raise ConversionError(f"the model takes images of {config.num_channels} channels (expected 1 or 3)")
    program = make_any_size_onnx(model, processor, torch.float32)
    programs = folder / "onnx"
    programs.mkdir(parents=True)
    program.save(programs / "model.onnx")
    _compress(programs / "model.onnx", programs / "model_fp16.onnx", to_int8=False)
    _compress(programs / "model.onnx", programs / "model_quantized.onnx", to_int8=True)
    for file, tolerance in (("model.onnx", None), ("model_fp16.onnx", 0.1), ("model_quantized.onnx", math.inf)):
        check_any_size_onnx(programs / file, model, processor, np.float32, tolerance)
    write_json(folder / "config.json", _config(config))
    write_json(folder / "preprocessor_config.json", _PREPROCESSOR)
    settings = processor.settings()
    # of a crop the page shows the part of the image that the model sees, relative to its size after the resize
    crop = {"size": settings["size"], "crop_size": settings["crop_size"]} if settings["do_center_crop"] else None
    height, width = as_pair(config.image_size)
    choices = {"int8": "model_quantized.onnx", "float16": "model_fp16.onnx", "float32": "model.onnx"}
    return {
        "facts": f"{model.num_parameters():,} parameters, {config.num_labels:,} classes, {height} x {width} pixels",
        "scores": score_function(config),
        "thresholds": stored_thresholds(config),
        "attention": hasattr(model, "vit"),
        "channels": config.num_channels,
        "background": settings["background"],
        "crop": crop,
        "programs": [
            {"name": kind, "file": f"onnx/{file}", "bytes": (programs / file).stat().st_size}
            for kind, file in choices.items()
        ],
    }


# transformers.js passes the levels of the image on; the program resizes and normalizes them.
_PREPROCESSOR = {
    "image_processor_type": "ViTImageProcessor",
    "do_convert_rgb": True,
    "do_resize": False,
    "do_rescale": False,
    "do_normalize": False,
}


def _config(config: Any) -> dict[str, Any]:
    """Return config.json with the fields that transformers.js reads; for it every classifier is a ViT."""
    labels = {str(index): label for index, label in sorted(config.id2label.items())}
    return {
        "model_type": "vit",
        "architectures": ["ViTForImageClassification"],
        "image_size": config.image_size,
        "num_channels": config.num_channels,
        "problem_type": config.problem_type,
        "id2label": labels,
        "label2id": {label: int(index) for index, label in labels.items()},
    }


# ONNX Runtime's web assembly


def find_runtime() -> Path:
    """Return the pinned npm package of ONNX Runtime, which npm downloads once into the cache.

    Raises:
        ConversionError: npm is not installed, or cannot download it.
    """
    package = cached_assets_path("hf_vit", "runtime", "web") / f"{_RUNTIME}.tgz"
    if package.exists():
        return package
    npm = shutil.which("npm")
    if npm is None:
        raise ConversionError(f"npm, which downloads {_RUNTIME}, is not installed: pass the package with --runtime")
    with tempfile.TemporaryDirectory(dir=package.parent) as folder:
        done = subprocess.run([npm, "pack", _RUNTIME], cwd=folder, capture_output=True, text=True, errors="replace")
        packed = list(Path(folder).glob("*.tgz"))
        if done.returncode or len(packed) != 1:
            reason = " ".join(done.stderr.split())[-300:]
            raise ConversionError(f"npm cannot download {_RUNTIME} (pass the package with --runtime): {reason}")
        if (found := sha256_of(packed[0])) != _RUNTIME_SHA256:
            raise ConversionError(f"{_RUNTIME} has sha256 {found} (expected {_RUNTIME_SHA256}); nothing was written")
        packed[0].replace(package)
    return package


def _copy_runtime(package: Path, folder: Path) -> None:
    """Copy the runtime's files from an npm package, a folder or a .tgz."""
    folder.mkdir()
    try:
        for name in _RUNTIME_FILES:
            if package.is_dir():
                shutil.copyfile(package / "dist" / name, folder / name)
                continue
            with tarfile.open(package) as archive:
                member: Any = archive.extractfile(f"package/dist/{name}")
                (folder / name).write_bytes(member.read())
    except (OSError, KeyError, tarfile.TarError) as error:
        raise ConversionError(f"{package} is not the npm package onnxruntime-web: {error}") from error


# Weights of a program in fewer bits. Products stay in float32, which web assembly computes fastest.


def _compress(source: Path, target: Path, to_int8: bool) -> None:
    """Write a program with its large constants in fewer bits; the runtime converts them back.

    Args:
        source: the program.
        target: the file to write.
        to_int8: weights of products in int8, symmetric, with a scale for each output, and others in float16; else all
            in float16.
    """
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    program = onnx.load(source)
    graph = program.graph
    consumers: dict[str, list[Any]] = {}
    for node in graph.node:
        for name in node.input:
            consumers.setdefault(name, []).append(node)
    kept, nodes = [], []
    for constant in graph.initializer:
        name, values = constant.name, numpy_helper.to_array(constant)
        if values.dtype != np.float32 or values.size < _LEAST_VALUES:
            kept.append(constant)
            continue
        axis = _output_axis(consumers.get(name, []), values.ndim) if to_int8 else None
        if axis is None:
            arrays = {f"{name}_float16": values.astype(np.float16)}
            nodes.append(helper.make_node("Cast", list(arrays), [name], to=TensorProto.FLOAT))
        else:
            others = tuple(number for number in range(values.ndim) if number != axis)
            scale = np.maximum(np.abs(values).max(axis=others), 1e-12) / 127
            levels = np.round(values / np.expand_dims(scale, others)).astype(np.int8)
            arrays = {f"{name}_int8": levels, f"{name}_scale": scale.astype(np.float32)}
            nodes.append(helper.make_node("DequantizeLinear", list(arrays), [name], axis=axis))
        kept += [numpy_helper.from_array(np.ascontiguousarray(array), name) for name, array in arrays.items()]
    del graph.initializer[:]
    graph.initializer.extend(kept)
    nodes += graph.node
    del graph.node[:]
    graph.node.extend(nodes)
    onnx.save(program, target)


def _output_axis(users: list[Any], ndim: int) -> int | None:
    """Return the axis of a weight that counts a product's outputs; None for another constant."""
    kinds = {node.op_type for node in users}
    if kinds == {"Conv"}:
        return 0
    if kinds == {"MatMul"} and ndim == 2:
        return 1
    if kinds == {"Gemm"}:
        transposed = any(attribute.name == "transB" and attribute.i for attribute in users[0].attribute)
        return 0 if transposed else 1
    return None
