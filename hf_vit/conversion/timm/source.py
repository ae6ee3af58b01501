"""Source of timm's Vision Transformers and hybrids, and of DeiT, MAE and DINO, which use timm's names."""

from pathlib import Path
from typing import Any

from ...models.configuration_hf_vit import HfViTConfig, HfViTHybridConfig, as_pair, stem_stride
from ...models.image_resizing import BICUBIC
from ...models.modeling_hf_vit import HfViTForImageClassification, HfViTModel
from ..building import has_head, image_size_of, one_or_pair, projection, variants_of_the_paper, with_class_row
from ..checkpoint import Checkpoint
from ..inferred import Fields, Inferred, all_because, by, has_array, length_of
from ..numbers import IMAGENET, TIMM_NUMBERS
from ..rules import ConversionError, Rule, count_units, to_theirs
from ..source import Grid, Model, Naming, Request, Shapes, Writing
from ..torch_source import TorchSource
from .folder import description, preprocessing_of, write
from .table import POSITIONS, rules_for

_RESNET_ROOTS = ("patch_embed.backbone.stem.conv.weight", "patch_embed.backbone.conv.weight")
# the evaluations of DeiT, MAE and DINO: resize 256, centre crop 224
_FACEBOOK = {"preset": "timm", "resample": BICUBIC, "crop_pct": 224 / 256, **IMAGENET}
# timm's names of activations and poolings -> ours.
_ACTIVATIONS = {"gelu_tanh": "gelu_pytorch_tanh", "gelu": "gelu", "relu": "relu", "quick_gelu": "quick_gelu"}
_POOLINGS = {"token": "cls", "avg": "mean", "map": "map", "": "none"}
# Stem depths -> timm's architecture; every other size is an argument.
_HYBRIDS = {
    (): "vit_tiny_r_s16_p8_224",
    (2, 2, 2, 2): "vit_small_r26_s32_224",
    (3, 4, 9): "vit_base_r50_s16_224",
    (3, 4, 6, 3): "vit_large_r50_s32_224",
}


class Timm(TorchSource):
    """timm's models: queries, keys and values are one array, so the weights do not show the number of heads."""

    name = "timm"
    marker = "patch_embed.proj.weight"
    # heads of self-supervision and the decoder of MAE
    beside = r"^(mask_token$|decoder_|decoder\.|head\.(mlp|last_layer)\.)"
    head = ("head.weight", "head.bias")
    required = {marker: 4, "blocks.0.mlp.fc1.weight": 2}  # noqa: RUF012
    optional = {POSITIONS: 3, "pre_logits.fc.weight": 2, "head.weight": 2, **dict.fromkeys(_RESNET_ROOTS, 4)}  # noqa: RUF012
    format = "timm"
    models = (HfViTModel, HfViTForImageClassification)

    def naming(self, checkpoint: Checkpoint, request: Request) -> Naming | None:
        naming = super().naming(checkpoint, request)
        if naming is None:
            return None
        arrays = with_class_row(checkpoint, naming.arrays, "cls_token", POSITIONS, request.position_grid)
        return naming._replace(arrays=arrays)

    def sizes(self, shapes: Shapes, grid: Grid, file: str) -> Fields:
        hidden_size, map_channels, patch_rows, patch_columns = shapes[self.marker]
        has_cls = "cls_token" in shapes
        stem = _stem(shapes)
        stride = stem_stride(stem["stem_depths"].value) if stem else 1
        last_block = max(int(name.split(".")[1]) for name in shapes if name.startswith("blocks."))
        kernel = f"{self.marker} is {by(shapes[self.marker])}"
        class_token = has_array("cls_token", shapes)
        fields: Fields = {
            "patch_size": Inferred(one_or_pair(patch_rows, patch_columns), kernel),
            "num_channels": Inferred(map_channels, kernel),
            "hidden_size": Inferred(hidden_size, kernel),
            "num_hidden_layers": Inferred(last_block + 1, f"the last block is blocks.{last_block}"),
            "intermediate_size": length_of("blocks.0.mlp.fc1.weight", shapes, 0),
            **all_because({"hidden_act": "gelu", "layer_norm_eps": 1e-6}, "no array shows it; timm's default", True),
            "qkv_bias": has_array("blocks.0.attn.qkv.bias", shapes),
            "pooling": _pooling(shapes),
            "use_cls_token": class_token,
            "pool_patches_only": Inferred(has_cls, f"{class_token.because}; timm pools without the class token"),
            "norm_after_pooling": has_array("fc_norm.weight", shapes),
            "representation_size": length_of("pre_logits.fc.weight", shapes, 0),
            "position_interpolation": Inferred("bicubic", "as in timm"),
            **stem,
        }
        if "head.weight" in shapes:
            fields["num_labels"] = length_of("head.weight", shapes, 0)
        if POSITIONS not in shapes:
            fields["position_embedding_type"] = Inferred("none", "there is no table of positions")
        num_patches = shapes[POSITIONS][1] - has_cls if POSITIONS in shapes else None
        pixels = patch_rows * stride, patch_columns * stride
        return {**fields, "image_size": image_size_of(num_patches, pixels, grid, file, has_cls)}

    def stated(self, settings: dict[str, Any]) -> dict[str, Any]:
        arguments = settings.get("model_args") or {}
        fields: dict[str, Any] = {}
        if "act_layer" in arguments:
            fields["hidden_act"] = _ACTIVATIONS.get(arguments["act_layer"], arguments["act_layer"])
        if "num_heads" in arguments:
            fields["num_attention_heads"] = arguments["num_heads"]
        if "global_pool" in settings:
            if settings["global_pool"] not in _POOLINGS:
                known = ", ".join(_POOLINGS)
                raise ConversionError(f"cannot convert global_pool={settings['global_pool']!r} (expected {known})")
            fields["pooling"] = _POOLINGS[settings["global_pool"]]
        return fields

    def rules(self, config: HfViTConfig, has_head: bool) -> list[Rule]:
        return rules_for(config, has_head)

    def preprocessing(self, checkpoint: Checkpoint, dialect: dict[str, Any]) -> Inferred:
        """Return the preprocessing; DeiT, MAE and DINO are recognised by the key that holds the weights."""
        if checkpoint.container in ("model", "teacher", "student"):
            because = f"the weights are under {checkpoint.container!r}, as in DeiT, MAE and DINO"
            return Inferred(_FACEBOOK, because, is_assumed=True)
        return preprocessing_of(checkpoint.settings.get("pretrained_cfg") or checkpoint.settings)

    def lacks(self, model: Model, dialect: str) -> list[str]:
        config: Any = model.config
        lacking = variants_of_the_paper(config) + projection(config)
        if config.representation_size is not None:
            lacking.append("pre-logits layer (representation_size)")
        if config.position_embedding_type == "sincos2d":
            lacking.append("position embeddings of type sincos2d")
        if config.hidden_act not in _ACTIVATIONS.values():
            lacking.append(f"activation {config.hidden_act}")
        if config.pooling in ("mean", "map") and config.use_cls_token and not config.pool_patches_only:
            lacking.append("pooling that includes the class token")
        if config.pooling == "cls" and config.norm_after_pooling:
            lacking.append("LayerNorm of the class token only")
        if isinstance(config, HfViTHybridConfig) and tuple(config.stem_depths) not in _HYBRIDS:
            lacking.append(f"ResNet of depths {list(config.stem_depths)}")
        return lacking

    def write(self, model: Model, path: Path, options: Writing) -> dict[str, Any]:
        config: Any = model.config
        is_hybrid = isinstance(config, HfViTHybridConfig)
        architecture = _HYBRIDS[tuple(config.stem_depths)] if is_hybrid else "vit_base_patch16_224"
        arrays = to_theirs(model.state_dict(), self.rules(config, has_head(model)))
        arguments = _model_arguments(config, has_head(model))
        return write(path, arrays, description(config, architecture, arguments, "bicubic", 0.9), options.overwrite)


def _pooling(shapes: Shapes) -> Inferred:
    if "attn_pool.latent" in shapes:
        return Inferred("map", "there is an attn_pool")
    if "cls_token" not in shapes:
        return Inferred("mean", "there is no cls_token and no attn_pool")
    if "fc_norm.weight" in shapes:
        return Inferred("mean", "there is an fc_norm, which timm applies after the mean")
    return Inferred("cls", "there is a cls_token, and no fc_norm or attn_pool")


def _stem(shapes: Shapes) -> Fields:
    name = next((name for name in _RESNET_ROOTS if name in shapes), None)
    if name is None:
        return {}
    root = shapes[name]
    depths = count_units(shapes, r"patch_embed\.backbone\.stages\.(\d+)\.blocks\.(\d+)\.", first=0)
    return {
        "stem_depths": Inferred(depths, f"the ResNet has {len(depths)} stages, counted by their blocks"),
        **all_because({"stem_width": root[0], "num_channels": root[1]}, f"{name} is {by(root)}"),
        **all_because(TIMM_NUMBERS, "as in timm's ResNets"),
    }


def _model_arguments(config: HfViTConfig, has_head: bool) -> dict[str, Any]:
    """Return arguments of `timm.create_model` that override the architecture's own."""
    arguments = {
        "img_size": list(as_pair(config.image_size)),
        "in_chans": config.num_channels,
        "num_classes": config.num_labels if has_head else 0,
        "embed_dim": config.hidden_size,
        "depth": config.num_hidden_layers,
        "num_heads": config.num_attention_heads,
        "mlp_ratio": config.intermediate_size / config.hidden_size,
        "qkv_bias": config.qkv_bias,
        "act_layer": _their_name(_ACTIVATIONS, config.hidden_act),
        "class_token": config.use_cls_token,
        "global_pool": _their_name(_POOLINGS, config.pooling),
        "fc_norm": config.norm_after_pooling,
    }
    if config.position_embedding_type == "none":
        arguments["pos_embed"] = "none"
    return arguments if isinstance(config, HfViTHybridConfig) else arguments | {"patch_size": config.patch_size}


def _their_name(names: dict[str, str], ours: str) -> str:
    return next(theirs for theirs, name in names.items() if name == ours)
