"""timm's ViTs, hybrids and BiT, read and written; DeiT, MAE and DINO have timm's names and are read too.

Names are those of timm 1.0 (timm/models/vision_transformer.py, vision_transformer_hybrid.py, resnetv2.py);
`pre_logits.fc` is from timm before 0.6. A folder of timm holds weights, and a config.json with the architecture and
the settings of the evaluation.
"""

import csv
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers.utils import logging

from ..files.output import write_json
from ..models.configuration_hf_bit import DEPTHS, HfBiTConfig
from ..models.configuration_hf_vit import HfViTConfig, HfViTHybridConfig, stem_stride
from ..models.image_processing_hf_vit import HfViTImageProcessor
from ..models.resize_weights import BICUBIC, BILINEAR
from ..models.sizes import as_pair
from .checkpoint import Checkpoint
from .reading_back import read_timm_back
from .source import (
    MODELS,
    PAPER_DEFAULTS,
    UNKNOWN_IMAGE_SIZE,
    ArrayRef,
    ConvertOptions,
    Fields,
    Grid,
    Inferred,
    KeyMapping,
    Model,
    Shapes,
    TorchSource,
    format_value,
    has_head,
    image_size_of,
    no_embed_class_of,
    one_or_pair,
    unsupported_fields,
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
from .timm_preprocessing import evaluation_of, preprocessing_of

logger = logging.get_logger(__name__)


@dataclass(frozen=True)
class Architecture:
    """What the name of an architecture of timm states, and no array of a checkpoint shows.

    Attributes:
        width: number of channels of a token.
        heads: number of attention heads.
        activation: timm's name.
        epsilon: of LayerNorm.
        image_size: height and width in pixels.
        pooling: timm's `global_pool`.
        positions: "patches" if the table of positions has no row for the class token, otherwise "all".
        lacks: what it has that hf_vit lacks; "" for one that hf_vit computes.
    """

    width: int
    heads: int
    activation: str
    epsilon: float
    image_size: int
    pooling: str
    positions: str
    lacks: str


@cache
def architectures() -> dict[str, Architecture]:
    """Return the architectures of timm 1.0.31's ViTs, hybrids and ResNetV2, by name."""
    text = (files("hf_vit.conversion") / "timm_architectures.csv").read_text(encoding="utf-8")
    known = {}
    for row in csv.DictReader(text.splitlines()):
        known[row["architecture"]] = Architecture(
            width=int(row["width"] or 0),
            heads=int(row["heads"] or 0),
            activation=row["activation"],
            epsilon=float(row["epsilon"] or 0),
            image_size=int(row["image_size"] or 0),
            pooling=row["pooling"],
            positions=row["positions"],
            lacks=row["lacks"],
        )
    return known


def architecture_in(settings: Mapping[str, Any]) -> Architecture | None:
    """Return the architecture that a config.json names; None if it names none, or one that timm 1.0.31 lacks.

    Raises:
        ConversionError: hf_vit lacks something that the architecture has.
    """
    name = str(settings.get("architecture") or "")
    if not name:
        return None
    found = architectures().get(name)
    if found is None:
        return None
    if found.lacks:
        raise ConversionError(f"it is {name} of timm, which has {found.lacks}; hf_vit lacks it")
    return found


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
# Arguments of timm's VisionTransformer that arrays show too -> our field. The two must agree.
_SHOWN = {
    "patch_size": "patch_size",
    "embed_dim": "hidden_size",
    "depth": "num_hidden_layers",
    "in_chans": "num_channels",
    "num_classes": "num_labels",
    "class_token": "use_cls_token",
    "qkv_bias": "qkv_bias",
}
# Arguments that are read elsewhere, whose arrays the table of rules demands, or that do not change an evaluation.
_READ = {"act_layer", "num_heads", "global_pool", "img_size", "no_embed_class", "pool_include_prefix"}
_BY_ARRAYS = {"mlp_ratio", "fc_norm", "init_values", "pos_embed", "qk_norm", "pre_norm", "reg_tokens"}
_WITHOUT_EFFECT = {
    *("drop_rate", "pos_drop_rate", "patch_drop_rate", "proj_drop_rate", "attn_drop_rate", "drop_path_rate"),
    *("weight_init", "fix_init", "strict_img_size", "dynamic_img_size", "pretrained_cfg", "pretrained_cfg_overlay"),
}
_POOLINGS = {"token": "cls", "avg": "mean", "map": "map", "": "none"}
# Stem depths -> timm's architecture; every other size is an argument.
_HYBRIDS = {
    (): "vit_tiny_r_s16_p8_224",
    (2, 2, 2, 2): "vit_small_r26_s32_224",
    (3, 4, 9): "vit_base_r50_s16_224",
    (3, 4, 6, 3): "vit_large_r50_s32_224",
}
_CHOICES = {"position_embedding_type": ("learned", "none"), "hidden_act": _ACTIVATIONS.values()}
_FIXED = PAPER_DEFAULTS | {"projection_dim": None, "representation_size": None}
_CONSTANTS = {"layer_norm_eps": 1e-6, **TIMM_NUMBERS}


class Timm(TorchSource):
    """timm's models: queries, keys and values are one array, so the weights do not show the number of heads.

    evaluation: timm's evaluation of the released files, as arguments of `HfViTImageProcessor`.
    """

    format = "timm"
    name = "timm"
    marker = "patch_embed.proj.weight"
    # heads of self-supervision and the decoder of MAE
    not_encoder = r"^(mask_token$|decoder_|decoder\.|head\.(mlp|last_layer)\.)"
    head = ("head.weight", "head.bias")
    encoder = frozenset(
        ("patch_embed", "blocks", "norm", "fc_norm", "norm_pre", "attn_pool", "pre_logits", "cls_token", POSITIONS)
    )
    evaluation: dict[str, Any] = {"preset": "timm"}  # noqa: RUF012
    models = MODELS[HfViTConfig]

    def naming(self, checkpoint: Checkpoint, options: ConvertOptions) -> KeyMapping | None:
        naming = super().naming(checkpoint, options)
        if naming is None:
            return None
        name = checkpoint.settings.get("architecture")
        if architecture_in(checkpoint.settings) is None and name:
            logger.warning(
                f"{name} is no ViT of timm 1.0.31; what no array shows (activation, norms) is assumed as in a plain ViT"
            )
        arrays = _fold_layer_scale(checkpoint, naming.arrays)
        if len(arrays) < len(naming.arrays):
            naming.dialect["layer_scale"] = "folded into attention.o_proj and mlp.fc2"
        return naming._replace(arrays=arrays)

    def _grid(self, checkpoint: Checkpoint, arrays: Mapping[str, ArrayRef], options: ConvertOptions) -> Grid:
        """Return (rows, columns) of the table of positions, as the caller or config.json states; else None.

        Raises:
            ConversionError: the table does not have this grid; or nothing states a grid, and the table can have two.
        """
        if options.position_grid is not None:
            return options.position_grid
        stated = _image_size_in(checkpoint.settings)
        if POSITIONS not in arrays:
            if stated is None or self.marker not in arrays:
                return None
            return self._grid_of(stated, checkpoint, arrays)
        num_rows = checkpoint.shapes[arrays[POSITIONS].name][1]
        has_cls = "cls_token" in arrays
        if stated is None:
            if has_cls and math.isqrt(num_rows) ** 2 == num_rows:
                side = math.isqrt(num_rows)
                raise ConversionError(
                    f"its {num_rows} positions are {side} x {side} patches without one for the class token, or a class "
                    f"token and {side - 1} x {side + 1} patches; pass --position-grid RxC "
                    "(position_grid=(rows, columns))"
                )
            return None
        rows, columns = self._grid_of(stated, checkpoint, arrays)
        num_patches = rows * columns
        expected = {num_patches, num_patches + has_cls}
        is_for_patches = _positions_are_for_patches(checkpoint.settings)
        if is_for_patches is not None:
            expected = {num_patches if is_for_patches else num_patches + has_cls}
        if num_rows not in expected:
            counts = " or ".join(map(str, sorted(expected)))
            raise ConversionError(
                f"its config.json states images of {stated[0]} x {stated[1]} pixels, which have {counts} positions; "
                f"the file has {num_rows}"
            )
        return rows, columns

    def _grid_of(
        self, image_size: tuple[int, int], checkpoint: Checkpoint, arrays: Mapping[str, ArrayRef]
    ) -> tuple[int, int]:
        """Return (rows, columns) of the patches of an image of (height, width) pixels."""
        stride = 1
        if any(name in arrays for name in _RESNET_ROOTS):
            stages = {name.split(".")[3] for name in arrays if name.startswith("patch_embed.backbone.stages.")}
            stride = stem_stride([1] * len(stages))
        patch_height, patch_width = checkpoint.shapes[arrays[self.marker].name][2:]
        return image_size[0] // (patch_height * stride), image_size[1] // (patch_width * stride)

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
        pixels = [size * stride for size in shapes[self.marker][2:]]
        if POSITIONS not in shapes:
            fields["position_embedding_type"] = Inferred("none", "there is no table of positions")
            return {**fields, "image_size": image_size_of(None, pixels, grid, False)}
        num_positions = shapes[POSITIONS][1]
        if has_cls:
            fields["no_embed_class"] = no_embed_class_of(num_positions, grid)
        has_class_position = has_cls and not fields["no_embed_class"].value
        num_patches = num_positions - has_class_position
        return {**fields, "image_size": image_size_of(num_patches, pixels, grid, has_class_position)}

    def infer(self, shapes: Shapes, checkpoint: Checkpoint, naming: KeyMapping, options: ConvertOptions) -> Fields:
        grid = self._grid(checkpoint, naming.arrays, options)
        fields = super().infer(shapes, checkpoint, naming, replace(options, position_grid=grid))
        self._check_stated(checkpoint.settings, fields)
        if grid is not None and options.position_grid is None and "image_size" in fields:
            fields["image_size"] = self._stated_image_size(checkpoint.settings, fields["image_size"].value)
        return fields

    def _stated_image_size(self, settings: dict[str, Any], used: Any) -> Inferred:
        """Return the image size of the patches, with a warning if config.json states a size that they do not fill.

        timm's patch embedding drops the pixels to the right and below (384 at patches of 14: 378 are used).
        """
        stated = _image_size_in(settings)
        if stated == as_pair(used):
            return Inferred(used, "stated in config.json")
        reason = f"config.json states {format_value(stated)}, of which the patches use {format_value(as_pair(used))}"
        logger.warning(f"{reason}; images are resized to the latter, where timm drops the rest")
        return Inferred(used, reason, is_assumed=True)

    def _check_stated(self, settings: dict[str, Any], fields: Fields) -> None:
        """Raise ConversionError if config.json and the arrays differ, or if it states what hf_vit lacks."""
        arguments = settings.get("model_args") or {}
        stated = [(ours, arguments[theirs]) for theirs, ours in _SHOWN.items() if arguments.get(theirs) is not None]
        if settings.get("num_classes"):
            stated.append(("num_labels", settings["num_classes"]))
        for name, value in stated:
            if name not in fields:
                continue
            found = fields[name].value
            is_equal = as_pair(value) == as_pair(found) if name == "patch_size" else value == found
            if not is_equal:
                raise ConversionError(
                    f"its config.json states {name} {value}, and its arrays have {format_value(found)}"
                )
        known = {*_SHOWN, *_READ, *_BY_ARRAYS, *_WITHOUT_EFFECT}
        unknown = sorted(name for name, value in arguments.items() if name not in known and value is not None)
        if unknown:
            named = ", ".join(f"{name}={arguments[name]!r:.40}" for name in unknown)
            raise ConversionError(f"its config.json states arguments of timm that hf_vit lacks: {named}")

    def stated(self, settings: dict[str, Any], found: Fields) -> Fields:
        """Return what config.json states: its arguments win over the name of the architecture."""
        arguments = settings.get("model_args") or {}
        fields: dict[str, Any] = {}
        architecture = architecture_in(settings)
        if architecture is not None:
            fields["hidden_act"] = _ACTIVATIONS[architecture.activation]
            fields["layer_norm_eps"] = architecture.epsilon
            fields["pooling"] = _POOLINGS[architecture.pooling]
        poolings = {place["global_pool"] for place in (arguments, settings) if place.get("global_pool") is not None}
        if len(poolings) > 1 or not poolings <= _POOLINGS.keys():
            raise ConversionError(f"it has global_pool={sorted(poolings)} (expected one of {', '.join(_POOLINGS)})")
        if poolings:
            fields["pooling"] = _POOLINGS[poolings.pop()]
        activation: Any = arguments.get("act_layer")
        if activation is not None:
            fields["hidden_act"] = _ACTIVATIONS.get(activation, activation)
        if arguments.get("pool_include_prefix") is not None:
            fields["pool_patches_only"] = not arguments["pool_include_prefix"]
        stated = with_reason(fields, "stated in config.json")
        if arguments.get("num_heads") is not None:
            stated["num_attention_heads"] = Inferred(arguments["num_heads"], "stated in config.json")
        elif architecture is not None:
            stated["num_attention_heads"] = _heads_of(settings, architecture, found["hidden_size"].value)
        return stated

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
        if not checkpoint.settings:
            return Inferred(self.evaluation, "there is no config.json; that of timm's released files", True)
        return preprocessing_of(evaluation_in(checkpoint.settings))

    def unsupported(self, model: Model, dialect: str) -> list[str]:
        config: Any = model.config
        choices: dict[str, Any] = dict(_CHOICES)
        fixed = dict(_FIXED)
        if isinstance(config, HfViTHybridConfig):
            choices["stem_depths"] = list(map(list, _HYBRIDS))
            fixed["stem_width"] = 64
        if config.pooling == "cls":
            fixed["norm_after_pooling"] = False
        return unsupported_fields(config, choices, fixed)

    def write(self, model: Model, path: Path, dialect: str, processor: Any) -> Any:
        """Write the weights to a .safetensors file, or to a folder with a config.json; return the arguments."""
        config: Any = model.config
        constants = {name: value for name, value in _CONSTANTS.items() if hasattr(config, name)}
        if others := unsupported_fields(config, {}, constants):
            logger.warning(f"timm's outputs will differ slightly, because it has no setting for {', '.join(others)}")
        num_classes = config.num_labels if has_head(model) else 0
        arrays, arguments = to_theirs(model.state_dict(), self.rules(model)), self.arguments(config, num_classes)
        if path.suffix == ".safetensors":
            save_file(arrays, path, metadata={"format": "pt"})
            read_timm_back(path, arrays, model)
            return arguments
        has_processor = processor is not None
        if not has_processor:
            processor = HfViTImageProcessor.for_model(config, **self.evaluation)
            logger.warning("No image processor is given; config.json states the preprocessing of timm's released files")
        evaluation, differences = evaluation_of(processor, config)
        if differences and has_processor:
            logger.warning(
                f"timm's pixel values differ from the image processor's, because it lacks {'; '.join(differences)}"
            )
        described: dict[str, Any] = {
            "architecture": self.architecture(config),
            "num_classes": num_classes,
            "num_features": config.hidden_size,
            "pretrained_cfg": {
                **evaluation,
                "num_classes": num_classes,
                "classifier": self.head[0].removesuffix(".weight"),
                "first_conv": self.first_convolution(config),
            },
            "model_args": arguments,
        }
        names = [config.id2label[index] for index in range(num_classes)]
        if any(name != f"LABEL_{index}" for index, name in enumerate(names)):
            described["label_names"] = names
        if "global_pool" in arguments:
            described["global_pool"] = arguments["global_pool"]
        save_file(arrays, path / "model.safetensors", metadata={"format": "pt"})
        write_json(path / "config.json", described)
        read_timm_back(path, arrays, model)
        return arguments

    def architecture(self, config: Any) -> str:
        """Return timm's name of the architecture; "" if timm does not have it."""
        return _HYBRIDS[tuple(config.stem_depths)] if isinstance(config, HfViTHybridConfig) else "vit_base_patch16_224"

    def first_convolution(self, config: Any) -> str:
        """Return timm's name of the layer that reads the channels of an image."""
        if not isinstance(config, HfViTHybridConfig):
            return self.marker.removesuffix(".weight")
        with_stages, bare = _RESNET_ROOTS
        return (with_stages if config.stem_depths else bare).removesuffix(".weight")

    def arguments(self, config: Any, num_classes: int) -> dict[str, Any]:
        """Return the arguments of `timm.create_model` that override the architecture's own."""
        activations = {ours: theirs for theirs, ours in _ACTIVATIONS.items()}
        poolings = {ours: theirs for theirs, ours in _POOLINGS.items()}
        arguments = {
            "img_size": list(as_pair(config.image_size)),
            "patch_size": config.patch_size,
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
        if config.no_embed_class:
            arguments["no_embed_class"] = True
        if config.use_cls_token and config.pooling in ("mean", "map") and not config.pool_patches_only:
            arguments["pool_include_prefix"] = True
        return arguments


def _heads_of(settings: Mapping[str, Any], architecture: Architecture, width: int) -> Inferred:
    """Return the number of heads of an architecture; if nothing states its other width, it keeps a head's channels."""
    name = settings["architecture"]
    arguments = settings.get("model_args") or {}
    if width in (architecture.width, arguments.get("embed_dim")):
        return Inferred(architecture.heads, f"as in {name}")
    channels = architecture.width // architecture.heads
    reason = f"no array shows it; heads of {channels} channels, as in {name}"
    return Inferred(max(width // channels, 1), reason, is_assumed=True)


def evaluation_in(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the evaluation in a config.json: a flat one, of timm before 2023, holds them itself."""
    stated = settings.get("pretrained_cfg") or settings
    return {**stated, **(settings.get("pretrained_cfg_overlay") or {})}


def _image_size_in(settings: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return height and width in pixels that a config.json states; None if it states none."""
    arguments = settings.get("model_args") or {}
    if arguments.get("img_size") is not None:
        return as_pair(arguments["img_size"])
    if input_size := evaluation_in(settings).get("input_size"):
        return as_pair(input_size[1:])
    architecture = architectures().get(str(settings.get("architecture")))
    if architecture is None or not architecture.image_size:
        return None
    return as_pair(architecture.image_size)


def _positions_are_for_patches(settings: Mapping[str, Any]) -> bool | None:
    """Return whether the table of positions has no row for the class token, as stated; None if nothing states it."""
    arguments = settings.get("model_args") or {}
    if arguments.get("no_embed_class") is not None:
        return bool(arguments["no_embed_class"])
    architecture = architectures().get(str(settings.get("architecture")))
    return None if architecture is None else architecture.positions == "patches"


def _fold_layer_scale(checkpoint: Checkpoint, arrays: Mapping[str, ArrayRef]) -> dict[str, ArrayRef]:
    """Return the arrays without LayerScale: its factors scale the last layers of attention and MLP, which is exact.

    A block of DeiT III or DINOv2 computes x + gamma * (W h + b) = x + (gamma W) h + gamma b (arXiv 2103.17239).
    """
    scaled = dict(arrays)
    for name in arrays:
        match = re.fullmatch(r"(blocks\.\d+\.)(?:ls|gamma_)([12])(?:\.gamma)?", name)
        if match is None:
            continue
        gamma = checkpoint.read(scaled.pop(name).name).float()
        layer = match[1] + {"1": "attn.proj", "2": "mlp.fc2"}[match[2]]
        for kind in ("weight", "bias"):
            stored = arrays.get(f"{layer}.{kind}")
            if stored is not None:
                scaled[f"{layer}.{kind}"] = stored._replace(adapt=partial(_scale_rows, gamma))
    return scaled


def _scale_rows(factors: torch.Tensor, array: torch.Tensor) -> torch.Tensor:
    """Multiply each row of a weight (out, in), or each element of a bias (out,), by its factor (out,)."""
    return array * factors.to(array.device).view(-1, *[1] * (array.ndim - 1))


def _pooling(shapes: Shapes) -> Inferred:
    if "attn_pool.latent" in shapes:
        return Inferred("map", "there is an attn_pool")
    if "cls_token" not in shapes:
        return Inferred("mean", "there is no cls_token and no attn_pool")
    if "fc_norm.weight" in shapes:
        return Inferred("mean", "there is an fc_norm, which timm applies after the mean")
    return Inferred("cls", "there is a cls_token, and no fc_norm or attn_pool")


_ROOT = "stem.conv.weight"
_OF_BIT = {
    "layer_type": "preactivation",
    "padding": "fixed",
    "pool_padding": "zero",
    "spatial_mixing": "convolution",
    "weight_standardization_form": "variance",
}
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
    encoder = frozenset(("stem", "stages", "norm"))
    evaluation = {"preset": "timm", "resample": BILINEAR, "crop_pct": 0.875}  # noqa: RUF012
    models = MODELS[HfBiTConfig]

    def sizes(self, shapes: Shapes, grid: Grid) -> Fields:
        return {
            **shapes.sizes(_ROOT, num_channels=1, embedding_size=0),
            "depths": shapes.stages(r"stages\.(\d+)\.blocks\.(\d+)\.", first=0),
            # other numbers are big_transfer's, the defaults of the configuration
            "weight_standardization_eps": Inferred(TIMM_NUMBERS["weight_standardization_eps"], "as in timm's ResNets"),
            "image_size": UNKNOWN_IMAGE_SIZE,
            **shapes.sizes("head.fc.weight", optional=True, num_labels=0),
        }

    def stated(self, settings: dict[str, Any], found: Fields) -> Fields:
        architecture_in(settings)  # raises for a ResNet that is no BiT
        if settings.get("global_pool", "avg") != "avg":
            raise ConversionError(f"it has global_pool={settings['global_pool']!r} (expected avg)")
        size = evaluation_in(settings).get("input_size")
        return {} if size is None else with_reason({"image_size": one_or_pair(*size[1:])}, "stated in config.json")

    def table(self, config: HfBiTConfig) -> list[Rule]:
        return [
            Rule(_ROOT, "resnet.convolution.weight", as_is),
            *within("", "resnet.", _RESNET_UNIT),
            *weight_and_bias("norm", "norm"),
            Rule("head.fc.weight", "classifier.weight", _one_by_one),
            Rule("head.fc.bias", "classifier.bias", as_is),
        ]

    def unsupported(self, model: Model, dialect: str) -> list[str]:
        config: Any = model.config
        found = unsupported_fields(config, {}, _OF_BIT)
        if not self.architecture(config):
            found.append(f"depths={config.depths} with embedding_size={config.embedding_size}")
        return found

    def architecture(self, config: HfBiTConfig) -> str:
        return _ARCHITECTURES.get((tuple(config.depths), config.embedding_size / 64), "")

    def first_convolution(self, config: HfBiTConfig) -> str:
        return _ROOT.removesuffix(".weight")

    def arguments(self, config: HfBiTConfig, num_classes: int) -> dict[str, Any]:
        return {"in_chans": config.num_channels, "num_classes": num_classes}
