"""Source of folders with transformers' own `vit`, `vit_mae`, `vit-hybrid` or `bit`.

The tables of names are in `models`; `from_pretrained` applies them.
"""

from pathlib import Path
from typing import Any

import torch
import transformers

from ...files.contents import MARK
from ...files.output import new_folder
from ...files.reading import read_json_object
from ...loading import in_our_settings
from ...models.configuration_hf_bit import UPSTREAM_NUMBERS, HfBiTConfig, is_upstream_bit, translate_bit_settings
from ...models.configuration_hf_vision import wrong_types_refused
from ...models.configuration_hf_vit import HfViTConfig, HfViTHybridConfig, translate_settings
from ...models.modeling_hf_bit import HfBiTForImageClassification, HfBiTModel
from ...models.modeling_hf_vit import HfViTForImageClassification, HfViTModel
from ...models.modeling_masked_patch_prediction import HfViTForMaskedPatchPrediction
from ...upstream import is_of_transformers, model_class_for
from ..building import UNKNOWN_IMAGE_SIZE, has_head, other_numbers, projection, variants_of_the_paper
from ..checkpoint import Checkpoint
from ..inferred import Fields, Inferred, all_because
from ..rules import ConversionError, check_values
from ..source import Model, Naming, Request, Source, Writing
from .writing import their_model, their_processor

_MASKED_IMAGE_MODEL = "ViTForMaskedImageModeling"


class Transformers(Source):
    """transformers' models; the config.json holds GELU and epsilons, so logits are equal in both directions."""

    format = "transformers"
    models = (
        HfViTModel,
        HfViTForImageClassification,
        HfViTForMaskedPatchPrediction,
        HfBiTModel,
        HfBiTForImageClassification,
    )

    def naming(self, checkpoint: Checkpoint, request: Request) -> Naming | None:
        settings = checkpoint.settings
        dialect = {"names": "transformers", "model_type": settings.get("model_type")}
        return Naming(dialect) if is_of_transformers(settings) and not checkpoint.shapes else None

    def read(self, checkpoint: Checkpoint, naming: Naming, request: Request) -> tuple[Model, Fields, dict[str, Any]]:
        folder, settings = checkpoint.path.parent, checkpoint.settings
        try:
            with wrong_types_refused(f"the config.json of {folder}"):
                fields = translate_bit_settings(settings) if is_upstream_bit(settings) else translate_settings(settings)
                model_class = model_class_for(settings)
            if _rebuilds_whole_patches(settings):
                model, info = _load_masked_image_model(folder, fields | request.overrides)
            else:
                model, info = model_class.from_pretrained(  # pyright: ignore[reportGeneralTypeIssues]
                    folder,
                    output_loading_info=True,
                    dtype=torch.float32,
                    **({"device_map": "meta"} if request.without_weights else {}),
                    **request.overrides,
                )
        except ValueError as error:
            raise ConversionError(str(error)) from error
        if info["missing_keys"] or info["mismatched_keys"]:
            raise ConversionError(f"cannot convert {folder}: its weights lack the head that its config.json describes")
        arrays = {} if model.device.type == "meta" else model.state_dict()
        if problems := [text for name, array in arrays.items() for text in check_values(name, array)]:
            raise ConversionError(f"cannot convert {folder}: {'; '.join(problems)}")
        found = all_because(fields, "stated in config.json")
        if is_upstream_bit(settings):
            found = {"image_size": UNKNOWN_IMAGE_SIZE, **found}
        record = {
            "dialect": naming.dialect,
            "dtypes": [str(settings.get("dtype") or settings.get("torch_dtype") or "float32")],
            "inferred": fields,
            "overrides": request.overrides,
            "left_out": {},
            "beside": sorted(info["unexpected_keys"]),
        }
        return model.eval(), found, record

    def preprocessing(self, checkpoint: Checkpoint, dialect: dict[str, Any]) -> Inferred:
        return preprocessing_of(checkpoint.path.parent)

    def lacks(self, model: Model, dialect: str) -> list[str]:
        config: Any = model.config
        if isinstance(config, HfBiTConfig):
            has_padding = config.padding == "same" or config.layer_type == "preactivation"
            others = other_numbers(config, UPSTREAM_NUMBERS)
            return others if has_padding else [*others, f"ResNet of layer_type {config.layer_type} with fixed padding"]
        lacking = variants_of_the_paper(config) + projection(config)
        if isinstance(config, HfViTHybridConfig):
            lacking.append("ViT behind a ResNet")
        if config.pooling != "cls" or not config.use_cls_token or config.norm_after_pooling:
            lacking.append(f"pooling {config.pooling!r}, or ViT without a class token")
        if config.position_embedding_type in ("sincos2d", "none"):
            lacking.append(f"position embeddings of type {config.position_embedding_type}")
        if has_head(model) and config.representation_size is not None:
            lacking.append("pre-logits layer in front of a classifier")
        if isinstance(model, HfViTForMaskedPatchPrediction):
            rows, columns = config.grid_size
            if config.patch_target != "pixels":
                lacking.append(f"masked image model of patch_target {config.patch_target!r} (it predicts pixels)")
            if rows != columns or not isinstance(config.patch_size, int):
                lacking.append(f"masked image model of {rows} x {columns} patches (it has square grids)")
        return lacking

    def write(self, model: Model, path: Path, options: Writing) -> dict[str, Any]:
        theirs = their_model(model)
        with new_folder(path, options.overwrite) as folder:
            theirs.save_pretrained(folder)
            (folder / MARK).touch()
            if options.processor is not None:
                their_processor(model.config, options.processor).save_pretrained(folder)
        return {}


def preprocessing_of(folder: Path) -> Inferred:
    """Return the preprocessing in a folder's preprocessor_config.json, as arguments of `HfViTImageProcessor`."""
    file = folder / "preprocessor_config.json"
    if file.is_file():
        return Inferred(in_our_settings(read_json_object(file)), "stated in preprocessor_config.json")
    return Inferred(in_our_settings({}), "there is no preprocessor_config.json; transformers' default", is_assumed=True)


def _rebuilds_whole_patches(settings: dict[str, Any]) -> bool:
    """Tell whether it is a masked image model with one decoder output per patch (MAE's decoder is a Transformer)."""
    defaults = transformers.ViTConfig()
    patch_size, stride = (settings.get(name, getattr(defaults, name)) for name in ("patch_size", "encoder_stride"))
    return settings.get("architectures") == [_MASKED_IMAGE_MODEL] and patch_size == stride


def _load_masked_image_model(
    folder: Path, fields: dict[str, Any]
) -> tuple[HfViTForMaskedPatchPrediction, dict[str, Any]]:
    """Load a masked image model; its decoder (1 x 1 convolution and PixelShuffle) becomes our linear layer."""
    theirs, info = transformers.ViTForMaskedImageModeling.from_pretrained(  # pyright: ignore[reportGeneralTypeIssues]
        folder, output_loading_info=True, dtype=torch.float32
    )
    with torch.device("meta"):
        model = HfViTForMaskedPatchPrediction(HfViTConfig(**{**fields, "patch_target": "pixels"}))
    weights = theirs.state_dict()
    weights["mask_token"] = weights.pop("vit.embeddings.mask_token")
    weights["predictor.weight"] = weights.pop("decoder.0.weight").flatten(1)
    weights["predictor.bias"] = weights.pop("decoder.0.bias")
    model.load_state_dict(weights, assign=True)
    return model, info
