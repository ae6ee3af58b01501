"""Source of torchvision's Vision Transformers (torchvision/models/vision_transformer.py)."""

from typing import Any

from ..models.configuration_hf_vit import HfViTConfig
from ..models.resize_weights import BILINEAR
from .checkpoint import Checkpoint
from .source import Fields, Grid, Inferred, Shapes, TorchSource, image_size_of, with_reason
from .tables import IMAGENET, Rule, as_is, part, weight_and_bias, within

_POSITIONS = "encoder.pos_embedding"
_BLOCK = "encoder.layers.encoder_layer_"
_FC1 = f"{_BLOCK}0.mlp.0.weight"

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


_TABLE = [
    Rule("class_token", "embeddings.cls_token", as_is),
    *weight_and_bias("conv_proj", "embeddings.patch_embeddings.projection"),
    Rule(_POSITIONS, "embeddings.position_embeddings", as_is),
    *within(f"{_BLOCK}{{}}.", "layers.{}.", _ENCODER_BLOCK),
    *weight_and_bias("encoder.ln", "layernorm"),
    *weight_and_bias("heads.pre_logits", "pooler.dense"),
    *weight_and_bias("heads.head", "classifier"),
]


class Torchvision(TorchSource):
    """torchvision's models, for reading only: torchvision has no arguments for activation and epsilon."""

    name = "torchvision"
    marker = "conv_proj.weight"
    head = ("heads.head.weight", "heads.head.bias")
    encoder = frozenset(("class_token", "conv_proj", "encoder"))

    def canonical(self, name: str) -> str:
        """Return the name in the rules; `linear_1` and `linear_2` are torchvision's names before 0.13."""
        return name.replace("mlp.linear_1.", "mlp.0.").replace("mlp.linear_2.", "mlp.3.")

    def sizes(self, shapes: Shapes, grid: Grid) -> Fields:
        pixels = shapes[self.marker][2:]
        theirs = {"hidden_act": "gelu", "layer_norm_eps": 1e-6, "position_interpolation": "bicubic_aligned"}
        return {
            "patch_size": shapes.patch_size(self.marker, rows=2),
            **shapes.sizes(self.marker, num_channels=1, hidden_size=0),
            "num_hidden_layers": shapes.layers(rf"{_BLOCK}(\d+)\."),
            **shapes.sizes(_FC1, intermediate_size=0),
            "image_size": image_size_of(shapes[_POSITIONS][1] - 1, pixels, grid, has_class_position=True),
            **with_reason(theirs, "as in torchvision's ViTs"),
            "representation_size": Inferred(None, "there is no heads.pre_logits.weight"),
            **shapes.sizes("heads.pre_logits.weight", optional=True, representation_size=0),
            **shapes.sizes("heads.head.weight", optional=True, num_labels=0),
        }

    def table(self, config: HfViTConfig) -> list[Rule]:
        return _TABLE

    def preprocessing(self, checkpoint: Checkpoint, dialect: dict[str, Any]) -> Inferred:
        """Return the preprocessing of ViT_..._Weights.transforms(): resize 256, center crop 224."""
        settings = {"preset": "timm", "resample": BILINEAR, "crop_pct": 224 / 256, **IMAGENET}
        return Inferred(settings, "no array shows it; as for most of torchvision's weights", is_assumed=True)
