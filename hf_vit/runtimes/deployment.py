"""Deployment folders: a classifier as a program, and a script that runs it without torch.

| file | content |
| --- | --- |
| model.onnx, or model.xml and model.bin | levels 0 to 255 (batch, 3, height, width) -> logits, with normalization |
| program.json, labels.json, preprocessing.json, thresholds.json | settings, see `hf_vit.runtimes.runner` |
| predict.py | `python predict.py IMAGE ...` |
| classifier/ | what predict.py calls: copies of `hf_vit.runtimes.runner` and of the files that it imports |
"""

import copy
import io
import os
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from ..conversion.reading_back import TOLERANCES, check_outputs, model_output
from ..conversion.tables import ConversionError
from ..files.image_sizes import output_size, set_processor_size
from ..files.output import check_no_model, new_folder, refuse_existing, write_json
from ..models.image_processing_hf_vit import HfViTImageProcessor, Normalize
from ..models.pretrained import HfVisionPreTrainedModel
from ..models.scores import score_function, stored_thresholds
from ..models.sizes import Size
from .any_size import ANY_SIZE, check_processor, is_classifier, make_any_size_onnx, unsupported_sizes
from .programs import example_outputs, make_onnx, make_openvino
from .runner import PROGRAM, Classifier

RUNTIMES = {"onnx": "onnxruntime", "openvino": "openvino"}  # format -> package that the script needs
_INT8_TOLERANCE = 0.2  # two runtimes round to other levels
_PROGRAMS = {"onnx": "model.onnx", "openvino": "model.xml"}
_WRITTEN = (  # settings of the processor that preprocessing.json contains
    *("preset", "jpeg_dct", "size", "do_center_crop", "crop_size", "resample", "antialias", "resize_output"),
    *("do_flip_channel_order", "rescale_factor", "do_rescale", "do_normalize", "image_mean", "image_std", "background"),
)
RUNNER = (  # files of hf_vit, which do not need torch
    "runtimes/runner.py",
    "files/predictions.py",
    "files/printable.py",
    "models/image_decoding.py",
    "models/image_tiff.py",
    "models/resize_weights.py",
    "files/image_files.py",
)
_SCRIPT = '''"""Classify images with the program in this folder: python predict.py IMAGE ..."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
sys.dont_write_bytecode = True  # no other files in this folder

from classifier.runtimes.runner import Classifier, main  # noqa: E402, F401

if __name__ == "__main__":
    sys.exit(main(HERE))
'''


def export_deployment(
    model: HfVisionPreTrainedModel,
    folder: str | os.PathLike,
    to: str,
    processor: HfViTImageProcessor | None,
    size: Size | str | None = None,
    overwrite: bool = False,
) -> None:
    """Write a deployment folder, which runs without this package and torch; its files are listed in this module.

    Args:
        model: a classifier or encoder, on the CPU; the program computes in float32, that of an `Int8Model` in int8.
        folder: the folder to write; it appears when it is complete.
        to: "onnx" (extra `export`) or "openvino" (extra `openvino`).
        processor: the model's image processor. The script computes bit-identical levels.
        size: image size in pixels, an int or (height, width); by default the processor's. For "onnx" also "any": the
            program takes levels of any size, in uint8, and resizes them itself.
        overwrite: replace an existing folder.

    Raises:
        ConversionError: the script does not support the model or the processor; nothing is written.
        FileExistsError: `folder` exists and may not be overwritten, or holds a model.
        ImportError: the extra is not installed.
    """
    refuse_existing(folder, overwrite)
    check_no_model(folder)
    any_size = size == ANY_SIZE and to == "onnx"
    outputs = _outputs_of(model, any_size)
    processor = _processor_for_size(check_processor(processor), None if any_size else size)
    if model.dtype != torch.float32:
        model = copy.deepcopy(model).float()
    settings = processor.settings()
    write_program: Any = getattr(model, "write_program", None)  # of an Int8Model
    image_size: Any = output_size(processor)
    scaling = Normalize.of(processor).scale_and_offset()
    with new_folder(folder, overwrite) as draft:
        if any_size:
            make_any_size_onnx(model, processor).save(draft / _PROGRAMS[to])
        elif write_program is not None:
            write_program(draft / _PROGRAMS[to], image_size, scaling)
        elif to == "onnx":
            make_onnx(model, image_size, outputs, scaling).save(draft / _PROGRAMS[to])
        else:
            make_openvino(model, image_size, draft / _PROGRAMS[to], outputs, scaling)
        labels = model.config.id2label if "logits" in outputs else {}
        write_json(draft / "labels.json", {str(index): name for index, name in sorted(labels.items())})
        write_json(draft / "preprocessing.json", {name: settings[name] for name in _WRITTEN})
        write_json(draft / "thresholds.json", stored_thresholds(model.config))
        program = {"file": _PROGRAMS[to], "outputs": outputs, "resizes": any_size}
        program["scores"] = score_function(model.config)
        write_json(draft / PROGRAM, program)
        (draft / "predict.py").write_text(_SCRIPT, encoding="utf-8")
        for name in RUNNER:
            copy_of = draft / "classifier" / name
            copy_of.parent.mkdir(parents=True, exist_ok=True)
            copy_of.write_bytes((files("hf_vit") / name).read_bytes())
        _check(draft, model, processor, image_size)


def _check(folder: Path, model: Any, processor: HfViTImageProcessor, image_size: tuple[int, int]) -> None:
    """Compute one image with a folder, as predict.py does; compare the output with the model's.

    Raises:
        ConversionError: they differ.
    """
    deployed = Classifier(folder)
    height, width = image_size
    levels = np.random.default_rng(0).integers(0, 256, (height + 5, width + 9, 3), np.uint8)
    png = io.BytesIO()
    Image.fromarray(levels).save(png, format="png")
    found = deployed.run(deployed.outputs[0], deployed.pixel_values(png.getvalue()))
    pixel_values = processor(png.getvalue(), return_tensors="pt").pixel_values
    if hasattr(model, "write_program"):
        expected = model_output(model, pixel_values)
        tolerance = _INT8_TOLERANCE
    else:
        _, expected = example_outputs(model, image_size, deployed.outputs[:1], pixel_values)
        tolerance = TOLERANCES[torch.float32]
    check_outputs(deployed.program["file"], found, expected, tolerance)


def _outputs_of(model: Any, any_size: bool) -> list[str]:
    """Return the names of the program's outputs; raise ConversionError for a model without one row per image."""
    if getattr(model.config, "pooling", None) == "none":
        raise ConversionError(f"{type(model).__name__} does not pool (expected a classifier or encoder that pools)")
    if any_size or hasattr(model, "write_program"):  # such programs compute logits only
        return ["logits"]
    return ["logits", "pooler_output"] if is_classifier(model) else ["pooler_output"]


def _processor_for_size(processor: HfViTImageProcessor, size: Size | str | None) -> HfViTImageProcessor:
    """Return the processor for images of `size`; raise ConversionError if the script does not support it."""
    if isinstance(size, str):
        raise ConversionError(f"size is {size!r}, but a deployment folder needs a fixed image size (N or HxW)")
    if size is not None:
        processor = copy.deepcopy(processor)
        set_processor_size(processor, size)
    settings = processor.settings()
    problem = unsupported_sizes(settings)
    if settings["num_channels"] != 3 or not settings["do_convert_rgb"]:
        problem = f"num_channels={settings['num_channels']}, do_convert_rgb={settings['do_convert_rgb']}"
    elif settings["reduced_decoding"]:
        problem = "reduced_decoding decodes JPEGs at a fraction of their size"
    if problem:
        raise ConversionError(f"predict.py does not support the preprocessing: {problem}")
    return processor
