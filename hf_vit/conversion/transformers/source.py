"""Sources of transformers' folders: `vit`, `vit_mae`, `vit-hybrid`, `bit`, `siglip_vision_model`, and Flax's ViT.

The tables of settings and names are in `names`.
"""

from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from ...files.output import new_folder
from ...files.reading import read_json_object
from ...models.configuration_hf_bit import HfBiTConfig
from ...models.configuration_hf_vision import wrong_types_refused
from ...models.configuration_hf_vit import HfViTConfig, HfViTHybridConfig, as_pair
from ...models.modeling_hf_bit import HfBiTForImageClassification, HfBiTModel
from ...models.modeling_hf_vit import HfViTForImageClassification, HfViTModel
from ...models.modeling_masked_patch_prediction import HfViTForMaskedPatchPrediction
from ...models.utils import check_pushed
from ..checkpoint import Checkpoint
from ..jax.tables import dense, norm
from ..source import (
    UNKNOWN_IMAGE_SIZE,
    Fields,
    Inferred,
    Model,
    Naming,
    Request,
    RuleSource,
    Shapes,
    Source,
    StoredArray,
    Writer,
    Writing,
    build_config,
    by,
    has_head,
    length_of,
    other_numbers,
    projection,
    variants_of_the_paper,
    with_reason,
)
from ..tables import ConversionError, Rule, as_is, channels_first, check_values, within
from ..torch_files import read_shards
from .names import (
    BIT_NUMBERS,
    NO_POOLER,
    THEIR_MODELS,
    VIT_SETTINGS,
    is_of_transformers,
    model_class_for,
    our_name,
    translate_processor,
    translate_settings,
)
from .writing import save_for_transformers

logger = logging.get_logger(__name__)

_MASKED_IMAGE_MODEL = "ViTForMaskedImageModeling"


class Transformers(Source, Writer):
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
                fields, model_class = translate_settings(settings), model_class_for(settings)
            check_pushed(folder, {})
            model_type = settings["model_type"]
            weights = {our_name(name, model_type): array for name, array in read_shards(checkpoint.path).items()}
            if model_type == "siglip_vision_model":
                _split_siglip(weights)
            if settings.get("pooler_act") == NO_POOLER["pooler_act"]:
                _drop_identity(weights)
            if not any("pooler.dense." in name for name in weights):  # the config.json does not tell
                fields.pop("representation_size", None)
            if _rebuilds_whole_patches(settings) and "decoder.0.weight" in weights:
                # its decoder, a 1 x 1 convolution and PixelShuffle, is our linear layer
                model_class, fields["patch_target"] = HfViTForMaskedPatchPrediction, "pixels"
                weights["mask_token"] = weights.pop("vit.embeddings.mask_token")
                weights["predictor.weight"] = weights.pop("decoder.0.weight").flatten(1)
                weights["predictor.bias"] = weights.pop("decoder.0.bias")
            beside = {name for name in weights if name.endswith("embeddings.mask_token") or name.startswith("decoder.")}
            model, info = model_class.from_pretrained(  # pyright: ignore[reportGeneralTypeIssues]
                None,
                config=build_config({**fields, **request.overrides}),
                state_dict={name: array for name, array in weights.items() if name not in beside},
                output_loading_info=True,
                dtype=torch.float32,
                **({"device_map": "meta"} if request.without_weights else {}),
            )
        except ValueError as error:
            raise ConversionError(f"cannot convert {folder}: {error}") from error
        if info["missing_keys"] or info["mismatched_keys"]:
            raise ConversionError(f"cannot convert {folder}: its weights lack the head that its config.json describes")
        arrays = {} if model.device.type == "meta" else model.state_dict()
        if problems := [text for name, array in arrays.items() for text in check_values(name, array)]:
            raise ConversionError(f"cannot convert {folder}: {'; '.join(problems)}")
        found = with_reason(fields, "stated in config.json")
        if settings["model_type"] == "bit":
            found = {"image_size": UNKNOWN_IMAGE_SIZE, **found}
        record = {
            "dialect": naming.dialect,
            "dtypes": [str(settings.get("dtype") or settings.get("torch_dtype") or "float32")],
            "inferred": fields,
            "overrides": request.overrides,
            "left_out": {},
            "beside": sorted({*beside, *info["unexpected_keys"]}),
        }
        return model.eval(), found, record

    def preprocessing(self, checkpoint: Checkpoint, dialect: dict[str, Any]) -> Inferred:
        return preprocessing_of(checkpoint)

    def unsupported(self, model: Model, dialect: str) -> list[str]:
        config: Any = model.config
        if isinstance(config, HfBiTConfig):
            has_padding = config.padding == "same" or config.layer_type == "preactivation"
            others = other_numbers(config, BIT_NUMBERS)
            return others if has_padding else [*others, f"ResNet of layer_type {config.layer_type} with fixed padding"]
        found = variants_of_the_paper(config) + projection(config)
        if config.pooling == "map" and not config.use_cls_token and not has_head(model):
            return [*found, *(f"{name} {getattr(config, name)} in a SigLIP tower" for name in _not_of_siglip(config))]
        is_bare, positions = not has_head(model), config.position_embedding_type
        has_token = config.pooling == "cls" and config.use_cls_token and not config.norm_after_pooling
        predicts = isinstance(model, HfViTForMaskedPatchPrediction)
        is_square = isinstance(config.patch_size, int) and config.grid_size[0] == config.grid_size[1]
        target, grid = config.patch_target, by(config.grid_size)
        features = {
            "ViT behind a ResNet": isinstance(config, HfViTHybridConfig),
            f"pooling {config.pooling!r}, or ViT without a class token": not has_token,
            f"position embeddings of type {positions}": positions in ("sincos2d", "none"),
            "pre-logits layer in front of a classifier": not is_bare and config.representation_size is not None,
            f"masked image model of patch_target {target!r} (it predicts pixels)": predicts and target != "pixels",
            f"masked image model of {grid} patches (it has square grids)": predicts and not is_square,
        }
        return found + [feature for feature, is_used in features.items() if is_used]

    def write(self, model: Model, path: Path, options: Writing) -> dict[str, Any]:
        with new_folder(path, options.overwrite) as folder:
            save_for_transformers(model, options.processor, folder, options.images)
        return {}


def preprocessing_of(checkpoint: Checkpoint) -> Inferred:
    """Return the preprocessing in a folder's preprocessor_config.json, as arguments of `HfViTImageProcessor`."""
    folder = checkpoint.path.parent
    file = folder / "preprocessor_config.json"
    if file.is_file():
        return Inferred(translate_processor(read_json_object(file)), "stated in preprocessor_config.json")
    usual = THEIR_MODELS[checkpoint.settings["model_type"]].preprocessing
    logger.warning(
        f"{folder} holds no image processor. One was made with the preset {usual['preset']!r}, that of the published "
        "models of this type. If the weights were trained with other values, set them on the processor."
    )
    return Inferred(usual, "there is no preprocessor_config.json; that of the published models", is_assumed=True)


def _not_of_siglip(config: Any) -> list[str]:
    """List the fields in which a tower with attention pooling differs from SiglipVisionModel."""
    expected = {"position_embedding_type": "learned", "norm_after_pooling": False, "representation_size": None}
    expected |= {"qkv_bias": True, "hidden_dropout_prob": 0}
    different = [field for field, value in expected.items() if getattr(config, field) != value]
    return [
        *different,
        *(field for field in ("image_size", "patch_size") if len({*as_pair(getattr(config, field))}) > 1),
    ]


def _split_siglip(weights: dict[str, torch.Tensor]) -> None:
    """Bring the two arrays of a SigLIP tower that have another shape into ours."""
    positions = "embeddings.position_embeddings"
    weights[positions] = weights[positions][None]  # (1, patches, hidden_size)
    for kind in ("weight", "bias"):
        arrays = weights.pop(f"pooler.map.qkv_proj.{kind}").chunk(3)
        weights |= {f"pooler.map.{name}_proj.{kind}": array for name, array in zip("qkv", arrays, strict=True)}


def _drop_identity(weights: dict[str, torch.Tensor]) -> None:
    """Drop a pooler that returns the class token, see `NO_POOLER`."""
    weight, bias = weights.pop("pooler.dense.weight"), weights.pop("pooler.dense.bias")
    if bias.any() or not torch.equal(weight, torch.eye(*weight.shape, dtype=weight.dtype)):
        raise ValueError(f"cannot read this ViT: pooler_act is {NO_POOLER['pooler_act']!r} (expected 'tanh')")


def _rebuilds_whole_patches(settings: dict[str, Any]) -> bool:
    """Tell whether it is a masked image model with one decoder output per patch (MAE's decoder is a Transformer)."""
    defaults = {**VIT_SETTINGS, "encoder_stride": 16}  # of ViTConfig
    patch_size, stride = (settings.get(name, defaults[name]) for name in ("patch_size", "encoder_stride"))
    return settings.get("architectures") == [_MASKED_IMAGE_MODEL] and patch_size == stride


_KERNEL = "embeddings/patch_embeddings/projection/kernel"
_POOLER = "pooler/dense/kernel"
_LINEAR = {  # linear layers of a block -> our names
    "attention/attention/query": "attention.q_proj",
    "attention/attention/key": "attention.k_proj",
    "attention/attention/value": "attention.v_proj",
    "attention/output/dense": "attention.o_proj",
    "intermediate/dense": "mlp.fc1",
    "output/dense": "mlp.fc2",
}
_FLAX_TABLE = [
    Rule("embeddings/cls_token", "embeddings.cls_token", as_is),
    Rule("embeddings/position_embeddings", "embeddings.position_embeddings", as_is),
    Rule(_KERNEL, "embeddings.patch_embeddings.projection.weight", channels_first),
    Rule(_KERNEL.replace("kernel", "bias"), "embeddings.patch_embeddings.projection.bias", as_is),
    *within("encoder/layer/{}/", "layers.{}.", norm("layernorm_before", "layernorm_before")),
    *within("encoder/layer/{}/", "layers.{}.", norm("layernorm_after", "layernorm_after")),
    *(rule for names in _LINEAR.items() for rule in within("encoder/layer/{}/", "layers.{}.", dense(*names))),
    *norm("layernorm", "layernorm"),
    *dense("pooler/dense", "pooler.dense"),
    *dense("classifier", "classifier"),
]


class FlaxTransformers(RuleSource):
    """Models of modeling_flax_vit.py (transformers 4.44); the prefix `vit/` is present in classifiers only."""

    head = ("classifier/kernel", "classifier/bias")
    axes = {_POOLER: 2, "classifier/kernel": 2}  # noqa: RUF012

    def naming(self, checkpoint: Checkpoint, request: Request) -> Naming | None:
        if checkpoint.settings.get("model_type") != "vit" or not {_KERNEL, f"vit/{_KERNEL}"} & set(checkpoint.shapes):
            return None
        arrays = {name.removeprefix("vit/"): StoredArray(name) for name in checkpoint.shapes}
        return Naming({"names": "transformers", "model_type": "vit", "framework": "flax"}, arrays)

    def infer(self, shapes: Shapes, checkpoint: Checkpoint, request: Request) -> Fields:
        with wrong_types_refused(f"the config.json of {checkpoint.path.parent}"):
            fields = with_reason(translate_settings(checkpoint.settings), "stated in config.json")
        fields["representation_size"] = length_of(_POOLER, shapes, 1)
        if "classifier/kernel" in shapes:
            fields["num_labels"] = length_of("classifier/kernel", shapes, 1)
        return fields

    def table(self, config: HfViTConfig) -> list[Rule]:
        return _FLAX_TABLE

    def preprocessing(self, checkpoint: Checkpoint, dialect: dict[str, Any]) -> Inferred:
        return preprocessing_of(checkpoint)
