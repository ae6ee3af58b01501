"""`hf-vit catalog`, `convert`, `export` and `fingerprint`."""

import argparse
import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

from ..files.json_files import parse_json
from ..files.messages import silence_progress_bars
from ..files.output import refuse_existing
from ..files.removed_names import describe_removed
from .arguments import Count, Model, Overwrite, SaveFor, Size, parse_size


def catalog(
    query: Annotated[
        str, 'an architecture ("B/16", "R50+L/32"), a family ("siglip2"), a file name, or a short name ("augreg:Ti/16")'
    ],
    *,
    adapted_to: Annotated[
        str | None, "only files fine-tuned on this data: imagenet2012, oxford_iiit_pet, ...", "DATA"
    ] = None,
    resolution: Annotated[int | None, "only files fine-tuned at this image size, 224 or 384", "PIXELS"] = None,
    index: Annotated[
        str | None, "search AugReg's index.csv, which lists 51,509 fine-tuned files: a path, https://... or gs://..."
    ] = None,
    limit: Annotated[Count, "largest number of files of an architecture to list"] = 10,
) -> None:
    """Find released checkpoints, or explain a file name."""
    from ..catalog import INDEX, explain, families, files_of, search, variants

    if query not in variants() and (adapted_to, resolution, index, limit) != (None, None, None, 10):
        raise ValueError(f"--adapted-to, --resolution, --index and --limit need an architecture (B/16), not {query}")
    if query in families():
        found = files_of(query)
    elif query in variants():
        found = search(query, adapted_to, resolution, index, limit)
    else:
        print(explain(query))
        return
    for location, about in found:
        print(location, f"  {about}", sep="\n")
    if query in variants():
        more = ", the --limit" if len(found) == limit else ""
        print(f"{len(found)} files{more}" + ("" if index else f"; to search all files of AugReg, add --index {INDEX}"))


# Other arguments of `convert` and of `Conversion.save`, which --set may not change.
_NOT_FIELDS = ("source", "output", "overwrite", "save_for", "read_weights", "where")


def _setting(text: str) -> tuple[str, object]:
    """Parse `name=value`; the value is JSON, or else text."""
    name, separator, value = text.partition("=")
    if not (separator and name.isidentifier()):
        raise argparse.ArgumentTypeError(f"cannot read {text!r} (expected FIELD=VALUE)")
    try:
        return name, parse_json(value, text)
    except ValueError:
        return name, value


def convert(
    source: Annotated[
        str,
        "checkpoint: an original .npz, a .safetensors or .pth file of timm, torchvision, DeiT, MAE or DINO, or a "
        "folder with one of these or a transformers model; given as a path, https://..., gs://bucket/path, a name on "
        "the Hub, augreg:Ti/16 (a released checkpoint), or augreg:best:B/16 (AugReg's recommended file of a variant)",
    ],
    output: Annotated[Path | None, "folder to write; not needed with --check"] = None,
    *,
    index: Annotated[
        str | None, "AugReg's index.csv, needed for `augreg:best:` with a variant that has no recommended file"
    ] = None,
    check: Annotated[
        bool, "write nothing; print the recognized model with reasons, the unused weights, and the assumptions"
    ] = False,
    labels: Annotated[str | None, "class names: imagenet1k, a text file with one name per line, or a JSON file"] = None,
    image_size: Annotated[
        Size, "image size in pixels, to which position embeddings are resampled (default: the checkpoint's)"
    ] = None,
    patch_size: Annotated[
        Size,
        "patch size in pixels for the forward, as in FlexiViT; the stored kernel and position embeddings are kept "
        "(default: the checkpoint's)",
    ] = None,
    position_grid: Annotated[Size, "rows x columns of the position embeddings (default: a square)", "RxC"] = None,
    weights: Annotated[
        str | None, "which of several sets of weights in the file, such as ema (default: the only or the averaged one)"
    ] = None,
    head: Annotated[str | None, "for files of PyTorch: name of the layer that is the head, such as fc"] = None,
    variant: Annotated[str | None, "for folders: variant of the files of weights, such as fp16"] = None,
    set_: Annotated[
        list[tuple[str, object]],
        "configuration field that the weights do not determine, such as num_attention_heads=4; may be repeated",
        {"type": _setting, "action": "append", "metavar": "FIELD=VALUE"},
    ] = (),  # pyright: ignore[reportArgumentType]
    save_for: SaveFor = None,
    overwrite: Overwrite = False,
) -> None:
    """Convert a checkpoint to a folder that from_pretrained loads."""
    if not check:
        if output is None:
            raise ValueError("there is no output folder; give one, or --check")
        refuse_existing(output, overwrite)
    silence_progress_bars()
    from .. import conversion
    from ..catalog import address_of
    from ..conversion.converting import describe_skipped

    source = address_of(source, index)
    options: dict[str, Any] = {
        "labels": labels,
        "image_size": image_size,
        "patch_size": patch_size,
        "position_grid": position_grid,
        "weights": weights,
        "head": head,
        "variant": variant,
    }
    for name, value in set_:
        if name in _NOT_FIELDS:
            raise ValueError(f"--set {name}={value}: {name} is not a configuration field")
        if options.get(name) is not None:
            raise ValueError(f"{name} is given twice: with --set and with its own option; remove one of them")
    options |= dict(set_)
    converted = conversion.convert(source, read_weights=False, **options)
    if output is None or check:
        print(converted.report())
        return
    saved = converted.save(output, overwrite, save_for or "hf_vit")
    model = saved.model
    record = saved.record
    print(f"{type(model).__name__}, {model.num_parameters():,} parameters, image size {model.config.image_size}")
    digest = f" (sha256 {record['sha256'][:16]}...)" if "sha256" in record else ""
    print(f"read as {record['dialect']['names']} from {record['source']}{digest}")
    for sentence in [*describe_skipped(record), *(f"assumed: {sentence}" for sentence in record["assumed"])]:
        print(sentence)
    print(f"saved in {output}")


Format = Literal["jax", "transformers", "timm", "onnx", "openvino", "torch-export", "web"]


def _format(text: str) -> str:
    """Return the name of a format; argparse's own error for an unknown one does not name what replaces it."""
    removed = describe_removed(f"format {text}")
    if removed is not None:
        raise argparse.ArgumentTypeError(removed)
    return text


def export(
    folder: Model,
    output: Annotated[
        Path,
        "path to write; transformers and web: a folder; timm: a file or a folder; openvino: a deployment folder "
        "(program, labels, preprocessing, predict.py); onnx: a .onnx file, or a deployment folder; others: a file",
    ],
    *,
    to: Annotated[Format, "format to write", {"type": _format}],
    dialect: Annotated[
        Literal["vit_jax", "flax", "big_vision", "big_transfer"] | None,
        "for jax: array names in the .npz (default: those of the converted file)",
    ] = None,
    original: Annotated[
        str | None,
        "for jax: the .npz that the model was converted from; its text tower, array names and data types are kept",
        "FILE",
    ] = None,
    size: Annotated[
        Any,
        "for onnx, openvino and torch-export: image size of the program in pixels; dynamic: any multiple of the patch "
        "size; any (onnx only): the program takes uint8 images of any size and resizes them itself (default: the "
        "model's own)",
        {
            "type": lambda text: text if text in ("dynamic", "any") else parse_size(text),
            "metavar": "N|HxW|dynamic|any",
        },
    ] = None,
    runtime: Annotated[
        str | None,
        "for web: folder or .tgz of the npm package onnxruntime-web (default: download it once into the cache)",
        "PACKAGE",
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Write a model in another format."""
    if size == "any" and to == "torch-export":
        raise ValueError(f"--size any needs --to onnx, not {to}")
    refuse_existing(output, overwrite)
    silence_progress_bars()
    from .. import conversion
    from ..files.runs import copy_reports
    from ..loading import find_model, load

    is_program_folder = to in ("onnx", "openvino") and output.suffix != ".onnx"
    takes_int8 = is_program_folder and size != "any"
    model, processor = load(folder, backend=None if takes_int8 else "eager")
    left = conversion.export(
        model,
        output,
        to,
        processor=processor,
        dialect=dialect,
        size=size,
        original=original,
        runtime=runtime,
        overwrite=overwrite,
    )
    if to == "transformers":
        copy_reports(find_model(folder).find_report, output)
    if left and not output.is_dir():  # the config.json of a folder has them
        print("for the same results, pass these arguments to timm.create_model:", json.dumps(left))
    print(f"saved in {output}")


def compile(
    folder: Model,
    *,
    to: Annotated[
        Literal["onnx", "openvino"] | None, "runtime of the program (default: onnx if it is installed, else openvino)"
    ] = None,
) -> None:
    """Make the program of a model once, in the cache, so that predict and embed answer at once.

    These commands then use ONNX Runtime or OpenVINO, without PyTorch, and say so; --backend eager uses PyTorch. If the
    files of the model change, its program is not used until it is compiled again.
    """
    silence_progress_bars()
    from ..loading import load, resolve_model
    from ..runtimes.deployment import export_deployment
    from ..runtimes.program_cache import add_compiled
    from .retrieval import identify_model

    model, processor = load(folder)
    runtime = to or ("openvino" if find_spec("onnxruntime") is None else "onnx")
    about = identify_model(str(resolve_model(folder)))
    made = add_compiled(folder, about, lambda path: export_deployment(model, path, runtime, processor, overwrite=True))
    print(f"made in {made}; hf-vit predict {folder} and hf-vit embed {folder} use it")


def fingerprint(source: Annotated[str, "model: an hf_vit folder, or any source of `hf-vit convert`"]) -> None:
    """Print a SHA-256 of a model's weights, which is the same in every format."""
    silence_progress_bars()
    from .. import conversion
    from ..catalog import released_with

    print(number := conversion.fingerprint(source))
    if (url := released_with(number)) is not None:
        print(f"same weights as {url}", file=sys.stderr)
