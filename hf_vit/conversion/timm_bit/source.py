"""Source of timm's BiT ResNets, `resnetv2_*_bit` (timm/models/resnetv2.py of timm 1.0)."""

from pathlib import Path
from typing import Any

from ...models.configuration_hf_bit import DEPTHS, HfBiTConfig
from ...models.modeling_hf_bit import HfBiTForImageClassification, HfBiTModel
from ..building import UNKNOWN_IMAGE_SIZE, has_head, one_or_pair, other_numbers
from ..checkpoint import Checkpoint
from ..inferred import Fields, Inferred, all_because, by, length_of
from ..numbers import TIMM_NUMBERS
from ..rules import ConversionError, Layout, Rule, as_is, count_units, resnet_units, table, to_theirs, weight_and_bias
from ..source import Grid, Model, Shapes, Writing
from ..timm.folder import description, preprocessing_of, write
from ..timm.table import RESNET_PROJECTION, RESNET_UNIT, UNIT_NAME
from ..torch_source import TorchSource

_ROOT = "stem.conv.weight"
_NUMBERS = {"layer_type": "preactivation", **TIMM_NUMBERS, "padding": "fixed", "pool_padding": "zero"}
_ARCHITECTURES: dict[tuple[tuple[int, ...], float], str] = {
    (DEPTHS[layers], factor): f"resnetv2_{layers}x{factor}_bit"
    for layers, factor in ((50, 1), (50, 3), (101, 1), (101, 3), (152, 2), (152, 4))
}
_one_by_one = Layout(  # (out, in, 1, 1) -> (out, in): the head is a convolution
    lambda kernel: kernel.flatten(1), lambda weight: weight[:, :, None, None]
)


class TimmBit(TorchSource):
    """timm's pre-activation ResNets. Other ResNets of timm are refused: norms of root and projections are unknown."""

    name = "timm_bit"
    marker = "stages.0.blocks.0.conv1.weight"
    head = ("head.fc.weight", "head.fc.bias")
    required = {_ROOT: 4, marker: 4, "norm.weight": 1}  # noqa: RUF012
    optional = {"head.fc.weight": 4}  # noqa: RUF012
    format = "timm"
    models = (HfBiTModel, HfBiTForImageClassification)

    def sizes(self, shapes: Shapes, grid: Grid, file: str) -> Fields:
        width, channels, *_ = shapes[_ROOT]
        depths = count_units(shapes, r"stages\.(\d+)\.blocks\.(\d+)\.", first=0)
        fields = {
            **all_because({"num_channels": channels, "embedding_size": width}, f"{_ROOT} is {by(shapes[_ROOT])}"),
            "depths": Inferred(depths, f"it has {len(depths)} stages, counted by their blocks"),
            # other numbers are big_transfer's, the defaults of the configuration
            "weight_standardization_eps": Inferred(_NUMBERS["weight_standardization_eps"], "as in timm's ResNets"),
            "image_size": UNKNOWN_IMAGE_SIZE,
        }
        if "head.fc.weight" in shapes:
            fields["num_labels"] = length_of("head.fc.weight", shapes, 0)
        return fields

    def stated(self, settings: dict[str, Any]) -> dict[str, Any]:
        if settings.get("global_pool", "avg") != "avg":
            raise ConversionError(f"cannot convert a BiT with global_pool={settings['global_pool']!r} (expected avg)")
        size = (settings.get("pretrained_cfg") or settings).get("input_size")
        return {} if size is None else {"image_size": one_or_pair(*size[1:])}

    def rules(self, config: HfBiTConfig, has_head: bool) -> list[Rule]:
        base = "bit." if has_head else ""
        resnet, projection = f"{base}resnet.", RESNET_PROJECTION[:1]  # without a norm
        head = (
            Rule("head.fc.weight", "classifier.weight", _one_by_one),
            Rule("head.fc.bias", "classifier.bias", as_is),
        )
        return table(
            [
                ("", resnet, [Rule(_ROOT, "convolution.weight", as_is)]),
                *resnet_units(config.depths, UNIT_NAME, 0, resnet, RESNET_UNIT, projection),
                ("", base, weight_and_bias("norm", "norm")),
                ("", "", head if has_head else ()),
            ]
        )

    def preprocessing(self, checkpoint: Checkpoint, dialect: dict[str, Any]) -> Inferred:
        if stated := checkpoint.settings.get("pretrained_cfg"):
            return preprocessing_of(stated)
        usual = preprocessing_of({"crop_pct": 0.875, "interpolation": "bilinear"}).value
        return Inferred(usual, "no config.json states it; timm's default for BiT", is_assumed=True)

    def lacks(self, model: Model, dialect: str) -> list[str]:
        config: Any = model.config
        lacking = other_numbers(config, _NUMBERS)
        if not _architecture(config):
            lacking.append(f"BiT of depths {config.depths} with {config.embedding_size} channels")
        return lacking

    def write(self, model: Model, path: Path, options: Writing) -> dict[str, Any]:
        config: Any = model.config
        arguments = {"in_chans": config.num_channels, "num_classes": config.num_labels if has_head(model) else 0}
        arrays = to_theirs(model.state_dict(), self.rules(config, has_head(model)))
        stated = description(config, _architecture(config), arguments, "bilinear", 0.875)
        return write(path, arrays, stated, options.overwrite)


def _architecture(config: HfBiTConfig) -> str:
    return _ARCHITECTURES.get((tuple(config.depths), config.embedding_size / 64), "")
