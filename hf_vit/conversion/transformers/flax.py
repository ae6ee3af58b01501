"""Source of folders with transformers 4's Flax ViT: `flax_model.msgpack` and its config.json."""

from typing import Any

from ...models.configuration_hf_vision import wrong_types_refused
from ...models.configuration_hf_vit import HfViTConfig
from ..checkpoint import Checkpoint
from ..jax.tables import dense, norm
from ..source import Fields, Inferred, Naming, Request, RuleSource, Shapes, StoredArray, length_of, with_reason
from ..tables import Block, Rule, as_is, channels_first, table
from .names import translate_settings
from .source import preprocessing_of

_KERNEL = "embeddings/patch_embeddings/projection/kernel"
_POOLER = "pooler/dense/kernel"
_EMBEDDINGS = (
    Rule("cls_token", "cls_token", as_is),
    Rule("position_embeddings", "position_embeddings", as_is),
    Rule("patch_embeddings/projection/kernel", "patch_embeddings.projection.weight", channels_first),
    Rule("patch_embeddings/projection/bias", "patch_embeddings.projection.bias", as_is),
)
_LINEAR = {  # linear layers of a block, kernel (in, out) -> our names
    "attention/attention/query": "attention.q_proj",
    "attention/attention/key": "attention.k_proj",
    "attention/attention/value": "attention.v_proj",
    "attention/output/dense": "attention.o_proj",
    "intermediate/dense": "mlp.fc1",
    "output/dense": "mlp.fc2",
}


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

    def rules(self, config: HfViTConfig, has_head: bool) -> list[Rule]:
        base = "vit." if has_head else ""
        blocks: list[Block] = [("embeddings/", f"{base}embeddings.", _EMBEDDINGS)]
        for index in range(config.num_hidden_layers):
            blocks.append((f"encoder/layer/{index}/", f"{base}layers.{index}.", _encoder_block(config.qkv_bias)))
        blocks.append(("", base, norm("layernorm", "layernorm")))
        if config.representation_size is not None:
            blocks.append(("", base, dense("pooler/dense", "pooler.dense")))
        return table([*blocks, ("", "", dense("classifier", "classifier") if has_head else ())])

    def preprocessing(self, checkpoint: Checkpoint, dialect: dict[str, Any]) -> Inferred:
        return preprocessing_of(checkpoint)


def _encoder_block(qkv_bias: bool) -> list[Rule]:
    rules = [*norm("layernorm_before", "layernorm_before"), *norm("layernorm_after", "layernorm_after")]
    for theirs, ours in _LINEAR.items():
        has_bias = qkv_bias or "attention/attention" not in theirs
        rules += dense(theirs, ours) if has_bias else dense(theirs, ours)[:1]
    return rules
