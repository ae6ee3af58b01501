"""Models of the benchmarks: one set of random weights, in every library that supports it.

Nothing here is timed. `make_checkpoints` writes the weights once, in each library's format. Every `load_...` takes that
folder and returns a model. The model maps images (batch, 3, height, width) to logits, or to an object with logits.
"""

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

if TYPE_CHECKING:
    from hf_vit import HfViTConfig

VIT_PYTORCH_NOTE = (
    "its own random weights: it has two more LayerNorms before the layers, and no biases of query, key and value"
)


def config_of(variant: str, image_size: int) -> "HfViTConfig":
    """Return the configuration of a variant with 1,000 classes; hybrids use timm's fixed constants."""
    from hf_vit import HfViTConfig

    numbers: dict[str, Any] = {}
    if variant.startswith("R"):
        numbers = {
            "group_norm_eps": 1e-5,
            "weight_standardization_eps": 1e-8,
            "weight_standardization_form": "variance",
        }
    return HfViTConfig.from_variant(variant, image_size=image_size, num_labels=1000, **numbers)


def make_checkpoints(config: "HfViTConfig", folder: Path) -> None:
    """Write checkpoints of random weights; none is 0 or 1, so that every misplaced weight changes the logits."""
    from transformers import AutoModelForImageClassification

    import hf_vit
    from hf_vit.conversion import ConversionError, export

    torch.manual_seed(0)
    model = AutoModelForImageClassification.from_config(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.02)
    assert isinstance(model, hf_vit.HfViTForImageClassification)
    model.save_pretrained(folder / "hf_vit")
    for name, to in {"timm": "timm", "transformers": "transformers", "jax.npz": "jax"}.items():
        with contextlib.suppress(ConversionError):  # the library lacks this model; loading it reports that
            export(model, folder / name, to)
    with contextlib.suppress(ConversionError):
        _export_torchvision(model, folder / "torchvision.pth")


def _export_torchvision(model, path: Path) -> None:
    from hf_vit.conversion import ConversionError
    from hf_vit.conversion.tables import to_theirs
    from hf_vit.conversion.torchvision import Torchvision

    if model.config.model_type != "hf_vit":
        raise ConversionError("torchvision has no hybrids")
    torch.save(to_theirs(model.state_dict(), Torchvision().rules(model)), path)


class NotThere(Exception):
    """Error of a contestant that cannot take part; the message gives the reason."""


def existing(path: Path) -> Path:
    if not path.exists():
        raise NotThere("it does not have this model")
    return path


def _load_hf_vit(folder: Path, dtype: torch.dtype, **settings) -> nn.Module:
    from transformers import AutoModelForImageClassification

    import hf_vit  # noqa: F401 - registers the Auto classes

    return AutoModelForImageClassification.from_pretrained(folder / "hf_vit", dtype=dtype, **settings)


def _load_transformers(folder: Path, dtype: torch.dtype, **settings) -> nn.Module:
    from transformers import ViTForImageClassification

    return ViTForImageClassification.from_pretrained(existing(folder / "transformers"), dtype=dtype, **settings)


def _load_timm(folder: Path, dtype: torch.dtype) -> nn.Module:
    import timm  # pyright: ignore[reportMissingImports] - a peer

    return timm.create_model(f"local-dir:{existing(folder / 'timm')}", pretrained=True).to(dtype)


def _load_torchvision(folder: Path, dtype: torch.dtype) -> nn.Module:
    """Load torchvision's model with its exact GELU; see `as_original`."""
    weights = torch.load(existing(folder / "torchvision.pth"))
    from torchvision.models import VisionTransformer  # pyright: ignore[reportMissingImports] - a peer

    sizes = sizes_of(folder)
    model = VisionTransformer(
        sizes["image_size"],
        sizes["patch_size"],
        sizes["num_hidden_layers"],
        sizes["num_attention_heads"],
        sizes["hidden_size"],
        sizes["intermediate_size"],
        num_classes=len(sizes["id2label"]),
    )
    model.load_state_dict(weights)
    return model.to(dtype)


def _load_vit_pytorch(folder: Path, dtype: torch.dtype) -> nn.Module:
    """Load vit-pytorch's model of the same size, with its own weights."""
    from vit_pytorch import ViT  # pyright: ignore[reportMissingImports] - a peer

    sizes = sizes_of(folder)
    if sizes["model_type"] != "hf_vit":
        raise NotThere("it does not have this model")
    return ViT(
        image_size=sizes["image_size"],
        patch_size=sizes["patch_size"],
        num_classes=len(sizes["id2label"]),
        dim=sizes["hidden_size"],
        depth=sizes["num_hidden_layers"],
        heads=sizes["num_attention_heads"],
        mlp_dim=sizes["intermediate_size"],
        dim_head=sizes["hidden_size"] // sizes["num_attention_heads"],
    ).to(dtype)


LOADERS: dict[str, Callable[..., nn.Module]] = {
    "hf_vit": _load_hf_vit,
    "transformers": _load_transformers,
    "timm": _load_timm,
    "torchvision": _load_torchvision,
    "vit-pytorch": _load_vit_pytorch,
}


def sizes_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "hf_vit" / "config.json").read_text(encoding="utf-8"))


@contextlib.contextmanager
def as_original(model: nn.Module) -> Iterator[None]:
    """Replace torchvision's GELU by the original's, to compare outputs; it is timed without this."""
    exact = [module for module in model.modules() if isinstance(module, nn.GELU) and module.approximate == "none"]
    for module in exact:
        module.approximate = "tanh"
    try:
        yield
    finally:
        for module in exact:
            module.approximate = "none"


def logits_of(output: Any) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output.logits


# OpenVINO and ONNX Runtime on the ONNX export of the same weights, without `hf_vit.runtimes`: a comparison shows
# its overhead or gain. Each gets the latency setting, the shape of the images and the number of threads when it is
# loaded. Inputs are not copied.

_PRECISIONS = {"float32": "f32", "bfloat16": "bf16"}


def load_runtime(name: str, folder: Path, dtype: str, shape: tuple[int, ...]) -> Callable[[Any], Any]:
    """Return a function from images (batch, 3, height, width), a float32 array, to logits."""
    if name == "ONNX Runtime" and dtype != "float32":
        raise NotThere(f"no kernels for {dtype} on a CPU")
    return (_load_openvino if name == "OpenVINO" else _load_onnxruntime)(_export(folder), dtype, shape)


def _export(folder: Path) -> Path:
    from hf_vit.conversion import export

    path = folder / "program.onnx"
    if not path.exists():
        model: Any = LOADERS["hf_vit"](folder, torch.float32)
        export(model, path, "onnx")
    return path


def _load_openvino(path: Path, dtype: str, shape: tuple[int, ...]) -> Callable[[Any], Any]:
    import openvino

    core = openvino.Core()
    model = core.read_model(path)
    model.reshape(list(shape))
    settings = {
        "INFERENCE_PRECISION_HINT": _PRECISIONS[dtype],
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
    }
    request = core.compile_model(model, "CPU", settings).create_infer_request()

    def forward(pixel_values: Any) -> Any:
        request.set_input_tensor(openvino.Tensor(pixel_values, shared_memory=True))
        request.infer()
        return np.array(request.get_output_tensor().data)

    return forward


def _load_onnxruntime(path: Path, dtype: str, shape: tuple[int, ...]) -> Callable[[Any], Any]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return lambda pixel_values: session.run(None, {"pixel_values": pixel_values})[0]
