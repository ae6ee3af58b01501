"""hf_vit: the original Vision Transformer family in the Hugging Face ecosystem, with the original's numbers.

Importing it registers the classes with transformers' Auto classes.
"""

import sys
from importlib import import_module
from pathlib import Path

__version__ = "0.1.0"

# Public names and where they live; each is imported when it is first asked for.
_CONFIGURATION, _MODELING = ".models.configuration_hf_vit", ".models.modeling_hf_vit"
_BIT_MODELING = ".models.modeling_hf_bit"
_HOME = {
    "HfViTConfig": _CONFIGURATION,
    "HfViTHybridConfig": _CONFIGURATION,
    "HfViTModel": _MODELING,
    "HfViTForImageClassification": _MODELING,
    "HfViTBackbone": _MODELING,
    "HfViTForMaskedPatchPrediction": ".models.modeling_masked_patch_prediction",
    "HfViTHybridModel": _MODELING,
    "HfViTHybridForImageClassification": _MODELING,
    "HfViTHybridBackbone": _MODELING,
    "HfBiTConfig": ".models.configuration_hf_bit",
    "HfBiTModel": _BIT_MODELING,
    "HfBiTForImageClassification": _BIT_MODELING,
    "HfBiTBackbone": _BIT_MODELING,
    "HfViTImageProcessor": ".images.image_processing_hf_vit",
    "register_auto_classes": ".models.auto",
    "push": ".hub.pushing",
    "add_code": ".hub.remote_code",
}
_MODULES = ("conversion", "analysis")

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


# The command `hf-vit` answers --help without torch: it registers when a command needs it.
if Path(sys.argv[0] if sys.argv else "").stem != "hf-vit":
    import_module(".models.auto", __name__).register_auto_classes()
    import_module(".hub.pushing", __name__).take_over_push_to_hub()
