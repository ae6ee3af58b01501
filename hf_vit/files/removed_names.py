"""Public names that were removed or renamed: the one table. Each gives one error that names its replacement."""

from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from ..models.sizes import REMOVED_ARGUMENTS

_NO_AOT_INDUCTOR = "use torch-export, and compile its program with torch._inductor.aoti_compile_and_package"

# Functions and classes by module, function arguments as `function(argument)`, options of commands as `--option`; other
# names after what they are: `command X`, `configuration field X`, `format X`, `module X`, `recipe X`, `setting X` (of
# training: a keyword argument, an option, and a key of recipes).
REMOVED_NAMES = {
    "hf_vit.analysis.attention_flow": "use attention_rollout",
    "hf_vit.conversion.check": "use convert(source, read_weights=False).report()",
    "hf_vit.conversion.convert_to_folder": "use convert(source, read_weights=False).save(folder)",
    "hf_vit.conversion.export_aot_inductor": _NO_AOT_INDUCTOR,
    "hf_vit.conversion.export_jax": 'use export(model, path, to="jax")',
    "hf_vit.conversion.export_onnx": 'use export(model, path, to="onnx"), with a path that ends in .onnx',
    "hf_vit.conversion.export_timm": 'use export(model, path, to="timm")',
    "hf_vit.conversion.export_torch": 'use export(model, path, to="torch-export")',
    "hf_vit.conversion.export_transformers": 'use export(model, folder, to="transformers")',
    "convert(images)": "docs/hub.md has what transformers' preprocessing costs for each preset",
    "load(name, image_size)": "the second argument is the head; use load(name, image_size=...)",
    "load(verify)": REMOVED_ARGUMENTS["from_pretrained(verify)"],
    **REMOVED_ARGUMENTS,
    "format aot-inductor": _NO_AOT_INDUCTOR,
    "module hf_vit.backends": "use hf_vit.runtimes",
    "module hf_vit.prediction": "use hf_vit.predict, predict_batches, embed and Predictor, which take the pair (model, "
    "processor) too, and hf_vit.inference.search.search",
    "recipe axial_jft": "use paper_jft --select model=Axial-ViT-B/32",
    "recipe axial_resnet_jft": "use paper_jft --select model=AxialResNet",
    "recipe axial_small": "use small --select length=short model=Axial-ViT",
    "recipe bit_hyperrule_large": "use bit_hyperrule --select size=large",
    "recipe bit_hyperrule_medium": "use bit_hyperrule --select size=medium",
    "recipe bit_hyperrule_small": "use bit_hyperrule --select size=small",
    "recipe figure3_i1k": "use paper_i1k, with the same groups for --select",
    "recipe figure3_i21k": "use paper_i21k, with the same groups for --select",
    "recipe figure3_small": "use small --select length=short images=360 weight_decay=0.1 dropout=0 label_smoothing=0",
    "recipe figure4_jft": "use paper_jft --select images=300M model=B/32",
    "recipe figure4_small": "use small --select length=short label_smoothing=0 architecture=vit",
    "recipe figure5_small": "use small --select size=64x4/4",
    "recipe figure8_jft": "use paper_jft --select model=8x1024/32 change=none",
    "recipe figure8_small": "use small --select length=short change=none",
    "recipe figure9_jft": "use paper_jft --select head=class_token",
    "recipe figure9_small": "use small --select head=class_token rate=0.003",
    "recipe finetune_cifar10": "use finetune_table4 --select dataset=cifar10",
    "recipe finetune_cifar100": "use finetune_table4 --select dataset=cifar100",
    "recipe finetune_flowers": "use finetune_table4 --select dataset=flowers",
    "recipe finetune_imagenet": "use finetune_table4 --select dataset=imagenet",
    "recipe finetune_pets": "use finetune_table4 --select dataset=pets",
    "recipe paper_i21k_b16": "use paper_i21k",
    "recipe table7_jft": "use paper_jft --select optimizer=adam model=R50x1",
    "recipe table7_small": "use small --select length=short architecture=resnet training=adam-0.003",
    "recipe table8_jft": "use paper_jft --select positions=1d",
    "recipe table8_small": "use small --select positions=1d",
    "setting decode_on": "the data workers decode all images",
    "--flow": "inspect draws attention rollout",
    "--images": "docs/hub.md has what transformers' preprocessing costs for each preset",
}

# Runs of earlier versions store every setting; the default of a removed one means what is done now.
_REMOVED_DEFAULTS = {"decode_on": "cpu"}

# Keys of conversion.json and of a checkpoint's state.json. Files with the old ones are still read.
RENAMED_KEYS = {"left_out": "dropped", "beside": "other_parts", "shares": "shards", "identity": "fingerprint"}


def with_new_keys(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a file that an earlier version may have written, with today's keys."""
    return {RENAMED_KEYS.get(name, name): value for name, value in content.items()}


class RemovedModules:
    """The last finder of `sys.meta_path`: it is asked for modules that exist nowhere, and explains our removed ones."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> None:
        """Find no module; raise ImportError if it was removed."""
        removed = describe_removed(f"module {name}")
        if removed is not None:
            raise ImportError(removed)


def refuse_removed(module: str, name: str) -> NoReturn:
    """Raise the error of a name that a module lacks: the `__getattr__` of modules with removed names.

    Raises:
        ImportError: it was removed. Not AttributeError, whose text `from ... import` drops.
        AttributeError: it never existed.
    """
    removed = describe_removed(f"{module}.{name}")
    if removed is None:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    raise ImportError(removed)


def check_removed(kind: str, name: str) -> None:
    """Raise ValueError if a name of this kind, such as "format", was removed."""
    removed = describe_removed(f"{kind} {name}")
    if removed is not None:
        raise ValueError(removed)


def check_removed_arguments(function: str, names: Iterable[str]) -> None:
    """Raise ValueError if an argument of a function was removed; some arguments are configuration fields."""
    for name in names:
        removed = describe_removed(f"{function}({name})")
        if removed is not None:
            raise ValueError(removed)
        check_removed("configuration field", name)


def drop_removed_settings(values: dict[str, Any]) -> dict[str, Any]:
    """Return the settings in a file without removed ones that have their default.

    Raises:
        ValueError: a removed setting has another value.
    """
    kept = {}
    for name, value in values.items():
        if name not in _REMOVED_DEFAULTS or value != _REMOVED_DEFAULTS[name]:
            check_removed("setting", name)
            kept[name] = value
    return kept


def describe_removed(name: str) -> str | None:
    """Return the error of a name that was removed; None if it was not."""
    replacement = REMOVED_NAMES.get(name)
    return None if replacement is None else f"{name} was removed: {replacement}"
