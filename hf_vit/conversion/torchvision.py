"""Source of torchvision's Vision Transformers (torchvision/models/vision_transformer.py)."""

from typing import Any

from ..models.configuration_hf_vit import HfViTConfig
from ..models.image_resizing import BILINEAR
from .checkpoint import Checkpoint
from .source import Fields, Grid, Inferred, Shapes, TorchSource, by, image_size_of, length_of, one_or_pair, with_reason
from .tables import IMAGENET, Block, Rule, as_is, part, table, weight_and_bias

_POSITIONS = "encoder.pos_embedding"
_BLOCK = "encoder.layers.encoder_layer_"
_FC1 = f"{_BLOCK}0.mlp.0.weight"

_EMBEDDINGS = (
    Rule("class_token", "cls_token", as_is),
    *weight_and_bias("conv_proj", "patch_embeddings.projection"),
    Rule(_POSITIONS, "position_embeddings", as_is),
)
# in_proj_weight and in_proj_bias hold query, key and value
_ENCODER_BLOCK = (
    *weight_and_bias("ln_1", "layernorm_before"),
    *(
        Rule(f"self_attention.in_proj_{kind}", f"attention.{projection}.{kind}", part(index, 3))
        for index, projection in enumerate(("q_proj", "k_proj", "v_proj"))
        for kind in ("weight", "bias")
    ),
    *weight_and_bias("self_attention.out_proj", "attention.o_proj"),
    *weight_and_bias("ln_2", "layernorm_after"),
    *weight_and_bias("mlp.0", "mlp.fc1"),
    *weight_and_bias("mlp.3", "mlp.fc2"),
)


class Torchvision(TorchSource):
    """torchvision's models, for reading only: torchvision has no arguments for activation and epsilon."""

    name = "torchvision"
    marker = "conv_proj.weight"
    head = ("heads.head.weight", "heads.head.bias")
    axes = {  # noqa: RUF012
        **{marker: 4, _POSITIONS: 3, _FC1: 2},
        **{"heads.pre_logits.weight": 2, "heads.head.weight": 2},
    }

    def canonical(self, name: str) -> str:
        """Return the name in the rules; `linear_1` and `linear_2` are torchvision's names before 0.13."""
        return name.replace("mlp.linear_1.", "mlp.0.").replace("mlp.linear_2.", "mlp.3.")

    def sizes(self, shapes: Shapes, grid: Grid, file: str) -> Fields:
        hidden_size, channels, *pixels = shapes[self.marker]
        layers = (int(name.removeprefix(_BLOCK).split(".")[0]) for name in shapes if name.startswith(_BLOCK))
        last_block = max(layers, default=0)
        kernel = f"{self.marker} is {by(shapes[self.marker])}"
        theirs = {"hidden_act": "gelu", "layer_norm_eps": 1e-6, "position_interpolation": "bicubic"}
        fields = {
            "patch_size": Inferred(one_or_pair(*pixels), kernel),
            "num_channels": Inferred(channels, kernel),
            "hidden_size": Inferred(hidden_size, kernel),
            "num_hidden_layers": Inferred(last_block + 1, f"the last block is encoder_layer_{last_block}"),
            "intermediate_size": Inferred(shapes[_FC1][0], f"{_FC1} is {by(shapes[_FC1])}"),
            "image_size": image_size_of(shapes[_POSITIONS][1] - 1, pixels, grid, file, has_cls=True),
            **with_reason(theirs, "as in torchvision's ViTs"),
            "representation_size": length_of("heads.pre_logits.weight", shapes, 0),
        }
        if "heads.head.weight" in shapes:
            fields["num_labels"] = length_of("heads.head.weight", shapes, 0)
        return fields

    def rules(self, config: HfViTConfig, has_head: bool) -> list[Rule]:
        base = "vit." if has_head else ""
        blocks: list[Block] = [("", f"{base}embeddings.", _EMBEDDINGS)]
        for index in range(config.num_hidden_layers):
            blocks.append((f"{_BLOCK}{index}.", f"{base}layers.{index}.", _ENCODER_BLOCK))
        blocks.append(("", base, weight_and_bias("encoder.ln", "layernorm")))
        if config.representation_size is not None:
            blocks.append(("", base, weight_and_bias("heads.pre_logits", "pooler.dense")))
        return table([*blocks, ("", "", weight_and_bias("heads.head", "classifier") if has_head else ())])

    def preprocessing(self, checkpoint: Checkpoint, dialect: dict[str, Any]) -> Inferred:
        """Return the preprocessing of ViT_..._Weights.transforms(): resize 256, centre crop 224."""
        settings = {"preset": "timm", "resample": BILINEAR, "crop_pct": 224 / 256, **IMAGENET}
        return Inferred(settings, "no array shows it; as for most of torchvision's weights", is_assumed=True)
