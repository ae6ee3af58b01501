"""hf_vit: the original Vision Transformer family in the Hugging Face ecosystem, with the original's numbers.

Importing the package registers its classes with transformers' Auto classes. The command `hf-vit` imports only modules
of the package, not the package itself (hf_vit_command.py).
"""

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

from .files.removed_names import RemovedModules

if TYPE_CHECKING:  # for editors; the same names as in `_HOME` and `_MODULES`
    from . import analysis as analysis
    from . import conversion as conversion
    from . import runtimes as runtimes
    from .auditing.audit import audit as audit
    from .evaluation.calibration import calibrate as calibrate
    from .evaluation.protocols import evaluate as evaluate
    from .evaluation.soups import soup as soup
    from .hub.pushing import push as push
    from .hub.pushing import push_saved as push_saved
    from .hub.remote_code import add_code as add_code
    from .inference.predictor import Predictor as Predictor
    from .inference.predictor import embed as embed
    from .inference.predictor import predict as predict
    from .inference.predictor import predict_batches as predict_batches
    from .loading import load as load
    from .loading import use_backend as use_backend
    from .models.configuration_hf_bit import HfBiTConfig as HfBiTConfig
    from .models.configuration_hf_vit import HfViTConfig as HfViTConfig
    from .models.configuration_hf_vit import HfViTHybridConfig as HfViTHybridConfig
    from .models.image_processing_hf_vit import HfViTImageProcessor as HfViTImageProcessor
    from .models.modeling_hf_bit import HfBiTBackbone as HfBiTBackbone
    from .models.modeling_hf_bit import HfBiTForImageClassification as HfBiTForImageClassification
    from .models.modeling_hf_bit import HfBiTModel as HfBiTModel
    from .models.modeling_hf_vit_variants import HfViTBackbone as HfViTBackbone
    from .models.modeling_hf_vit_variants import HfViTForImageClassification as HfViTForImageClassification
    from .models.modeling_hf_vit_variants import HfViTHybridBackbone as HfViTHybridBackbone
    from .models.modeling_hf_vit_variants import HfViTHybridForImageClassification as HfViTHybridForImageClassification
    from .models.modeling_hf_vit_variants import HfViTHybridModel as HfViTHybridModel
    from .models.modeling_hf_vit_variants import HfViTModel as HfViTModel
    from .models.modeling_masked_patch_prediction import HfViTForMaskedPatchPrediction as HfViTForMaskedPatchPrediction
    from .models.modeling_masked_patch_prediction import (
        HfViTHybridForMaskedPatchPrediction as HfViTHybridForMaskedPatchPrediction,
    )
    from .runtimes.quantization import quantize as quantize
    from .training.api import finetune as finetune
    from .training.api import pretrain as pretrain
    from .training.planning import plan as plan

__version__ = "0.1.0"

# Public names by module; each is imported at its first use.
_PUBLIC = {
    ".models.configuration_hf_vit": "HfViTConfig HfViTHybridConfig",
    ".models.configuration_hf_bit": "HfBiTConfig",
    ".models.modeling_hf_vit_variants": "HfViTModel HfViTForImageClassification HfViTBackbone HfViTHybridModel "
    "HfViTHybridForImageClassification HfViTHybridBackbone",
    ".models.modeling_masked_patch_prediction": "HfViTForMaskedPatchPrediction HfViTHybridForMaskedPatchPrediction",
    ".models.modeling_hf_bit": "HfBiTModel HfBiTForImageClassification HfBiTBackbone",
    ".models.image_processing_hf_vit": "HfViTImageProcessor",
    ".loading": "load use_backend",
    ".hub.pushing": "push push_saved",
    ".hub.remote_code": "add_code",
    ".runtimes.quantization": "quantize",
    ".inference.predictor": "predict predict_batches embed Predictor",
    ".evaluation.calibration": "calibrate",
    ".training.api": "finetune pretrain",
    ".training.planning": "plan",
    ".evaluation.protocols": "evaluate",
    ".evaluation.soups": "soup",
    ".auditing.audit": "audit",
}
_HOME = {name: module for module, names in _PUBLIC.items() for name in names.split()}
_MODULES = ("conversion", "analysis", "runtimes")

__all__ = ["__version__", *_HOME, *_MODULES]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str):
    if name in _HOME:
        value = getattr(import_module(_HOME[name], __name__), name)
    elif name in _MODULES:
        value = import_module(f".{name}", __name__)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


sys.meta_path.append(RemovedModules)  # pyright: ignore[reportArgumentType]
if find_spec("simplejpeg") is None:
    raise ImportError(
        "hf_vit needs simplejpeg, which decodes JPEGs as TensorFlow does. Run `pip install simplejpeg`; if there "
        "is no wheel for this machine, pip builds it with CMake and a C compiler."
    )
import_module(".models.registry", __name__)
