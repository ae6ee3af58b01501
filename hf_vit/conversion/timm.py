"""timm's ViTs, hybrids and BiT, read and written; DeiT, MAE and DINO have timm's names and are read too.

Names are those of timm 1.0 (timm/models/vision_transformer.py, vision_transformer_hybrid.py, resnetv2.py);
`pre_logits.fc` is from timm before 0.6. A folder of timm holds weights, and a config.json with the architecture and
the settings of the evaluation.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from transformers.utils import logging

from ..files.output import new_file, new_folder, write_json
from ..models.configuration_hf_bit import DEPTHS, HfBiTConfig
from ..models.configuration_hf_vit import HfViTConfig, HfViTHybridConfig, as_pair, stem_stride
from ..models.image_resizing import BICUBIC, BILINEAR
from .checkpoint import Checkpoint
from .source import (
    MODELS,
    PLAIN,
    UNKNOWN_IMAGE_SIZE,
    Fields,
    Grid,
    Inferred,
    Model,
    Naming,
    Request,
    Shapes,
    TorchSource,
    has_head,
    image_size_of,
    lacking,
    one_or_pair,
    with_class_row,
    with_reason,
)
from .tables import (
    IMAGENET,
    TIMM_NUMBERS,
    ConversionError,
    Layout,
    Rule,
    as_is,
    part,
    to_theirs,
    weight_and_bias,
    within,
)

logger = logging.get_logger(__name__)
_RESAMPLING = {"bilinear": BILINEAR, "bicubic": BICUBIC}


def preprocessing_of(pretrained_cfg: dict[str, Any]) -> Inferred:
    """Return the evaluation settings of a config.json, as arguments of `HfViTImageProcessor`; else timm's defaults."""
    found = {
        "crop_pct": pretrained_cfg.get("crop_pct"),
        "image_mean": pretrained_cfg.get("mean"),
        "image_std": pretrained_cfg.get("std"),
        "resample": _RESAMPLING.get(pretrained_cfg.get("interpolation", "")),
    }
    stated = {name: value for name, value in found.items() if value is not None}
    missing = ", ".join(name for name in found if name not in stated)
    reason = f"no config.json states {missing}; timm's default" if missing else "stated in config.json"
    return Inferred({"preset": "timm"} | stated, reason, is_assumed=bool(missing))


POSITIONS = "pos_embed"


def _fused(theirs: str, ours: str, *projections: str) -> Iterator[Rule]:
    for index, name in enumerate(projections):
        yield from weight_and_bias(theirs, f"{ours}{name}", part(index, len(projections)))


_ENCODER_BLOCK = (
    *weight_and_bias("norm1", "layernorm_before"),
    *_fused("attn.qkv", "attention.", "q_proj", "k_proj", "v_proj"),
    *weight_and_bias("attn.proj", "attention.o_proj"),
    *weight_and_bias("norm2", "layernorm_after"),
    *weight_and_bias("mlp.fc1", "mlp.fc1"),
    *weight_and_bias("mlp.fc2", "mlp.fc2"),
)
_MAP_HEAD = (
    Rule("latent", "probe", as_is),
    *weight_and_bias("q", "q_proj"),
    *_fused("kv", "", "k_proj", "v_proj"),
    *weight_and_bias("proj", "o_proj"),
    *weight_and_bias("norm", "layernorm"),
    *weight_and_bias("mlp.fc1", "mlp.fc1"),
    *weight_and_bias("mlp.fc2", "mlp.fc2"),
)
_RESNET_ROOT = (Rule("conv.weight", "convolution.weight", as_is), *weight_and_bias("norm", "norm"))
_RESNET_MODULES = [f"{kind}{number}" for kind in ("conv", "norm") for number in (1, 2, 3)]
_RESNET_UNIT = [  # a convolution has no bias
    rule
    for name in (*_RESNET_MODULES, "downsample.conv", "downsample.norm")
    for rule in weight_and_bias(f"stages.{{}}.blocks.{{}}.{name}", f"stages.{{}}.layers.{{}}.{name}")
]


_FC1 = "blocks.0.mlp.fc1.weight"
_RESNET_ROOTS = ("patch_embed.backbone.stem.conv.weight", "patch_embed.backbone.conv.weight")
# the evaluations of DeiT, MAE and DINO: resize 256, center crop 224
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
_CHOICES = {"position_embedding_type": ("learned", "none"), "hidden_act": _ACTIVATIONS.values()}
_FIXED = PLAIN | {"projection_dim": None, "representation_size": None}
_CONSTANTS = {"layer_norm_eps": 1e-6, **TIMM_NUMBERS}


class Timm(TorchSource):
    """timm's models: queries, keys and values are one array, so the weights do not show the number of heads.

    evaluation: settings of timm's evaluation, below 384 pixels.
    """

    format = "timm"
    name = "timm"
    marker = "patch_embed.proj.weight"
    # heads of self-supervision and the decoder of MAE
    not_encoder = r"^(mask_token$|decoder_|decoder\.|head\.(mlp|last_layer)\.)"
    head = ("head.weight", "head.bias")
    evaluation: dict[str, Any] = {"interpolation": "bicubic", "crop_pct": 0.9}  # noqa: RUF012
    models = MODELS[HfViTConfig]

    def naming(self, checkpoint: Checkpoint, request: Request) -> Naming | None:
        naming = super().naming(checkpoint, request)
        if naming is None:
            return None
        arrays = with_class_row(checkpoint, naming.arrays, "cls_token", POSITIONS, request.position_grid)
        return naming._replace(arrays=arrays)

    def sizes(self, shapes: Shapes, grid: Grid) -> Fields:
        has_cls = "cls_token" in shapes
        stem: Fields = {}
        if root := next((name for name in _RESNET_ROOTS if name in shapes), None):
            stem = {
                "stem_depths": shapes.stages(r"patch_embed\.backbone\.stages\.(\d+)\.blocks\.(\d+)\.", first=0),
                **shapes.sizes(root, stem_width=0, num_channels=1),
                **with_reason(TIMM_NUMBERS, "as in timm's ResNets"),
            }
        stride = stem_stride(stem["stem_depths"].value) if stem else 1
        class_token = shapes.has("cls_token")
        fields: Fields = {
            "patch_size": shapes.patch_size(self.marker, rows=2),
            **shapes.sizes(self.marker, num_channels=1, hidden_size=0),
            "num_hidden_layers": shapes.layers(r"blocks\.(\d+)\."),
            **shapes.sizes(_FC1, intermediate_size=0),
            **with_reason({"hidden_act": "gelu", "layer_norm_eps": 1e-6}, "no array shows it; timm's default", True),
            "qkv_bias": shapes.has("blocks.0.attn.qkv.bias"),
            "pooling": _pooling(shapes),
            "use_cls_token": class_token,
            "pool_patches_only": Inferred(has_cls, f"{class_token.reason}; timm pools without the class token"),
            "norm_after_pooling": shapes.has("fc_norm.weight"),
            "representation_size": Inferred(None, "there is no pre_logits.fc.weight"),
            **shapes.sizes("pre_logits.fc.weight", optional=True, representation_size=0),
            "position_interpolation": Inferred("bicubic", "as in timm"),
            **stem,
            **shapes.sizes("head.weight", optional=True, num_labels=0),
        }
        if POSITIONS not in shapes:
            fields["position_embedding_type"] = Inferred("none", "there is no table of positions")
        num_patches = shapes[POSITIONS][1] - has_cls if POSITIONS in shapes else None
        pixels = [size * stride for size in shapes[self.marker][2:]]
        return {**fields, "image_size": image_size_of(num_patches, pixels, grid, has_cls)}

    def stated(self, settings: dict[str, Any]) -> dict[str, Any]:
        arguments, pooling = settings.get("model_args") or {}, settings.get("global_pool", "token")
        if pooling not in _POOLINGS:
            raise ConversionError(f"it has global_pool={pooling!r} (expected {', '.join(_POOLINGS)})")
        activation: Any = arguments.get("act_layer")
        fields = {
            "hidden_act": _ACTIVATIONS.get(activation, activation),
            "num_attention_heads": arguments.get("num_heads"),
            "pooling": _POOLINGS[pooling] if "global_pool" in settings else None,
        }
        return {name: value for name, value in fields.items() if value is not None}

    def table(self, config: HfViTConfig) -> list[Rule]:
        backbone, stem = "patch_embed.backbone.", "embeddings.stem."
        root = f"{backbone}stem." if getattr(config, "stem_depths", ()) else backbone
        return [
            *within(root, stem, _RESNET_ROOT),
            *within(backbone, stem, _RESNET_UNIT),
            *weight_and_bias("patch_embed.proj", "embeddings.patch_embeddings.projection"),
            Rule("cls_token", "embeddings.cls_token", as_is),
            Rule(POSITIONS, "embeddings.position_embeddings", as_is),
            *within("blocks.{}.", "layers.{}.", _ENCODER_BLOCK),
            *weight_and_bias("fc_norm" if config.norm_after_pooling else "norm", "layernorm"),
            *within("attn_pool.", "pooler.map.", _MAP_HEAD),
            *weight_and_bias("pre_logits.fc", "pooler.dense"),
            *weight_and_bias("head", "classifier"),
        ]

    def preprocessing(self, checkpoint: Checkpoint, dialect: dict[str, Any]) -> Inferred:
        """Return the preprocessing; DeiT, MAE and DINO are recognized by the key that holds the weights."""
        if checkpoint.container in ("model", "teacher", "student"):
            reason = f"the weights are under {checkpoint.container!r}, as in DeiT, MAE and DINO"
            return Inferred(_FACEBOOK, reason, is_assumed=True)
        return preprocessing_of(checkpoint.settings.get("pretrained_cfg") or checkpoint.settings)

    def unsupported(self, model: Model, dialect: str) -> list[str]:
        config: Any = model.config
        choices: dict[str, Any] = dict(_CHOICES)
        fixed = dict(_FIXED)
        if isinstance(config, HfViTHybridConfig):
            choices["stem_depths"] = list(map(list, _HYBRIDS))
        if config.use_cls_token and config.pooling in ("mean", "map"):
            fixed["pool_patches_only"] = True
        elif config.pooling == "cls":
            fixed["norm_after_pooling"] = False
        return lacking(config, choices, fixed)

    def write(self, model: Model, path: Path, dialect: str, overwrite: bool, processor: Any) -> Any:
        """Write the weights to a .safetensors file, or to a folder with a config.json; return the arguments."""
        config: Any = model.config
        constants = {name: value for name, value in _CONSTANTS.items() if hasattr(config, name)}
        if others := lacking(config, {}, constants):
            logger.warning(f"timm's outputs will differ slightly, because it has no setting for {', '.join(others)}")
        num_classes = config.num_labels if has_head(model) else 0
        arrays, arguments = to_theirs(model.state_dict(), self.rules(model)), self.arguments(config, num_classes)
        if path.suffix == ".safetensors":
            with new_file(path, overwrite) as file:
                save_file(arrays, file, metadata={"format": "pt"})
            return arguments
        height, width = as_pair(config.image_size)
        names = [config.id2label[index] for index in range(num_classes)]
        has_names = any(name != f"LABEL_{index}" for index, name in enumerate(names))
        described = {
            "architecture": self.architecture(config),
            "num_classes": num_classes,
            **({"label_names": names} if has_names else {}),
            "num_features": config.hidden_size,
            "pretrained_cfg": {
                "input_size": [config.num_channels, height, width],
                **self.evaluation,
                **({"crop_pct": 1.0} if max(height, width) >= 384 else {}),
                "mean": [0.5] * config.num_channels,
                "std": [0.5] * config.num_channels,
                "num_classes": num_classes,
            },
            **({"global_pool": arguments["global_pool"]} if "global_pool" in arguments else {}),
            "model_args": arguments,
        }
        with new_folder(path, overwrite) as folder:
            save_file(arrays, folder / "model.safetensors", metadata={"format": "pt"})
            write_json(folder / "config.json", described)
        return arguments

    def architecture(self, config: Any) -> str:
        """Return timm's name of the architecture; "" if timm does not have it."""
        return _HYBRIDS[tuple(config.stem_depths)] if isinstance(config, HfViTHybridConfig) else "vit_base_patch16_224"

    def arguments(self, config: Any, num_classes: int) -> dict[str, Any]:
        """Return the arguments of `timm.create_model` that override the architecture's own."""
        activations = {ours: theirs for theirs, ours in _ACTIVATIONS.items()}
        poolings = {ours: theirs for theirs, ours in _POOLINGS.items()}
        arguments = {
            "img_size": list(as_pair(config.image_size)),
            "in_chans": config.num_channels,
            "num_classes": num_classes,
            "embed_dim": config.hidden_size,
            "depth": config.num_hidden_layers,
            "num_heads": config.num_attention_heads,
            "mlp_ratio": config.intermediate_size / config.hidden_size,
            "qkv_bias": config.qkv_bias,
            "act_layer": activations[config.hidden_act],
            "class_token": config.use_cls_token,
            "global_pool": poolings[config.pooling],
            "fc_norm": config.norm_after_pooling,
        }
        if config.position_embedding_type == "none":
            arguments["pos_embed"] = "none"
        return arguments if isinstance(config, HfViTHybridConfig) else arguments | {"patch_size": config.patch_size}


def _pooling(shapes: Shapes) -> Inferred:
    if "attn_pool.latent" in shapes:
        return Inferred("map", "there is an attn_pool")
    if "cls_token" not in shapes:
        return Inferred("mean", "there is no cls_token and no attn_pool")
    if "fc_norm.weight" in shapes:
        return Inferred("mean", "there is an fc_norm, which timm applies after the mean")
    return Inferred("cls", "there is a cls_token, and no fc_norm or attn_pool")


_ROOT = "stem.conv.weight"
_NUMBERS = {"layer_type": "preactivation", **TIMM_NUMBERS, "padding": "fixed", "pool_padding": "zero"}
_NUMBERS["spatial_mixing"] = "convolution"
_ARCHITECTURES: dict[tuple[tuple[int, ...], float], str] = {
    (DEPTHS[layers], factor): f"resnetv2_{layers}x{factor}_bit"
    for layers, factor in ((50, 1), (50, 3), (101, 1), (101, 3), (152, 2), (152, 4))
}
_one_by_one = Layout(  # (out, in, 1, 1) -> (out, in): the head is a convolution
    lambda kernel: kernel.flatten(1), lambda weight: weight[:, :, None, None]
)


class TimmBit(Timm):
    """timm's pre-activation ResNets. Other ResNets of timm are refused: norms of root and projections are unknown."""

    name = "timm_bit"
    marker = "stages.0.blocks.0.conv1.weight"
    head = ("head.fc.weight", "head.fc.bias")
    evaluation = {"interpolation": "bilinear", "crop_pct": 0.875}  # noqa: RUF012
    models = MODELS[HfBiTConfig]

    def sizes(self, shapes: Shapes, grid: Grid) -> Fields:
        return {
            **shapes.sizes(_ROOT, num_channels=1, embedding_size=0),
            "depths": shapes.stages(r"stages\.(\d+)\.blocks\.(\d+)\.", first=0),
            # other numbers are big_transfer's, the defaults of the configuration
            "weight_standardization_eps": Inferred(_NUMBERS["weight_standardization_eps"], "as in timm's ResNets"),
            "image_size": UNKNOWN_IMAGE_SIZE,
            **shapes.sizes("head.fc.weight", optional=True, num_labels=0),
        }

    def stated(self, settings: dict[str, Any]) -> dict[str, Any]:
        if settings.get("global_pool", "avg") != "avg":
            raise ConversionError(f"it has global_pool={settings['global_pool']!r} (expected avg)")
        size = (settings.get("pretrained_cfg") or settings).get("input_size")
        return {} if size is None else {"image_size": one_or_pair(*size[1:])}

    def table(self, config: HfBiTConfig) -> list[Rule]:
        return [
            Rule(_ROOT, "resnet.convolution.weight", as_is),
            *within("", "resnet.", _RESNET_UNIT),
            *weight_and_bias("norm", "norm"),
            Rule("head.fc.weight", "classifier.weight", _one_by_one),
            Rule("head.fc.bias", "classifier.bias", as_is),
        ]

    def preprocessing(self, checkpoint: Checkpoint, dialect: dict[str, Any]) -> Inferred:
        if stated := checkpoint.settings.get("pretrained_cfg"):
            return preprocessing_of(stated)
        usual = preprocessing_of(self.evaluation).value
        return Inferred(usual, "no config.json states it; timm's default for BiT", is_assumed=True)

    def unsupported(self, model: Model, dialect: str) -> list[str]:
        config: Any = model.config
        found = lacking(config, {}, _NUMBERS)
        if not self.architecture(config):
            found.append(f"depths={config.depths} with embedding_size={config.embedding_size}")
        return found

    def architecture(self, config: HfBiTConfig) -> str:
        return _ARCHITECTURES.get((tuple(config.depths), config.embedding_size / 64), "")

    def arguments(self, config: HfBiTConfig, num_classes: int) -> dict[str, Any]:
        return {"in_chans": config.num_channels, "num_classes": num_classes}
