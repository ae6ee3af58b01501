"""Makes trees.json: names and shapes of every family's arrays at full size, as the original classes initialize them.

    pip install jax==0.10.2 flax==0.12.8 einops ml_collections distrax
    git clone https://github.com/google-research/big_vision           # 0127fb6
    git clone https://github.com/google-research/vision_transformer   # c6de1e5
    PYTHONPATH=big_vision:vision_transformer JAX_PLATFORMS=cpu python tests/goldens_peers/make_trees.py

Nothing is computed (`jax.eval_shape`). Arrays that repeat from block to block are one line: `encoderblock_{12}` stands
for the numbers 0 to 11. Towers of text are the small ones of ../goldens/more/arrays.json.
"""

import json
import re
import sys
from pathlib import Path
from unittest.mock import MagicMock

import flax
import flax.training.checkpoints  # noqa: F401 - looks for TensorFlow, before there is a stand-in
import jax
import jax.numpy as jnp
import ml_collections

for module in ("tensorflow", "tensorflow.io", "tensorflow.io.gfile", "flaxformer", "flaxformer.architectures",
               "flaxformer.architectures.bert"):  # fmt: skip
    sys.modules[module] = MagicMock()  # for reading files and for BERT, neither of which is needed here
sys.modules["tensorflow"].Tensor = sys.modules["tensorflow"].Variable = type("Tensor", (), {})  # einops asks for them

from big_vision.models import bit_paper, vit  # noqa: E402
from big_vision.models.proj.cappa import cappa  # noqa: E402
from big_vision.models.proj.clippo import one_tower  # noqa: E402
from big_vision.models.proj.givt import cnn, givt  # noqa: E402
from big_vision.models.proj.givt import vit as givt_vit  # noqa: E402
from big_vision.models.proj.image_text import naflex_vit, text_transformer  # noqa: E402
from big_vision.models.proj.jet import jet  # noqa: E402
from big_vision.models.proj.jetformer import jetformer  # noqa: E402
from big_vision.models.proj.uvim import vit as uvim_vit  # noqa: E402
from big_vision.models.proj.uvim import vtt  # noqa: E402
from vit_jax import models_mixer, models_vit  # noqa: E402
from vit_jax.configs import models as configs  # noqa: E402

HERE = Path(__file__).parent
RELEASED = {"LayerNorm_1": "LayerNorm_2", "MultiHeadDotProductAttention_0": "MultiHeadDotProductAttention_1",
            "MlpBlock_0": "MlpBlock_3"}  # fmt: skip


def tree(model, *inputs, prefix="", collections=("params",), **arguments) -> dict[str, list[int]]:
    """Names and shapes of the parameters; other collections (BatchNorm, an exponential average) are beside them."""
    inputs = [jnp.zeros(shape) if isinstance(shape, tuple) and isinstance(shape[0], int) else shape for shape in inputs]
    rngs = {name: jax.random.key(0) for name in ("params", "dropout", "state", "vqvae", "other")}
    variables = flax.core.unfreeze(jax.eval_shape(lambda: model.init(rngs, *inputs, **arguments)))
    parameters = variables["params"] if collections == ("params",) else {name: variables[name] for name in collections}
    arrays = flax.traverse_util.flatten_dict(parameters, sep="/")
    return {prefix + name: list(array.shape) for name, array in arrays.items()}


def vit_jax(name: str, pixels: int = 224, classes: int = 21843, prefix: str = "", **changes) -> dict:
    """A ViT of vit_jax; its released files number the modules of a block by position, those of LiT by class."""
    config = getattr(configs, f"get_{name}_config")()
    fields = {key: value for key, value in config.items() if key not in ("model_name", "fix_gamma")}
    if "resnet" in fields:
        fields["resnet"] = ml_collections.ConfigDict(fields["resnet"])
    model = models_vit.VisionTransformer(num_classes=classes, **{**fields, **changes})
    arrays = tree(model, (1, pixels, pixels, 3), prefix=prefix, train=False)
    if prefix:
        return arrays

    def by_position(match):
        return match[1] + RELEASED.get(match[2], match[2])

    return {re.sub(r"(encoderblock_\d+/)(\w+)", by_position, name): shape for name, shape in arrays.items()}


def big_vision(variant: str, pixels: int = 224, prefix: str = "", **options) -> dict:
    """A ViT of big_vision."""
    return tree(vit.Model(variant=variant, **options), (1, pixels, pixels, 3), prefix=prefix)


def text(checkpoint: str) -> dict:
    """What stands beside the image tower of a checkpoint of goldens/more."""
    arrays = json.loads((HERE.parent / "goldens" / "more" / "arrays.json").read_text())[checkpoint]
    return {name: shape for name, (shape, _) in arrays.items() if "img/" not in name}


def families() -> dict[str, dict]:
    tokens = jnp.zeros((1, 16), jnp.int32)
    siglip = {"num_classes": None, "pool_type": "map", "prefix": "params/img/"}
    paligemma = {"num_classes": 2048, "pool_type": "none", "scan": True, "prefix": "params/img/"}
    naflex = naflex_vit.Model(variant="B", num_classes=None, pool_type="map", nposemb=16, scan=True)
    jetformer_sizes = {"width": 64, "depth": 2, "mlp_dim": 128, "num_heads": 2, "num_kv_heads": 1, "head_dim": 32,
                       "out_dim": 16, "bos_id": 1, "boi_id": 2, "nolabel_id": 3}  # fmt: skip
    numbers = jnp.zeros((1, 9), jnp.int32)
    patches = (jnp.zeros((1, 9, 768)), numbers, numbers, numbers)  # and their type, row and column
    mixer = {key: value for key, value in configs.get_mixer_b16_config().items() if key != "model_name"}
    clippo = {"variant": "B/16", "pool_type": "map", "head_zeroinit": False}
    pixels = {"semantics": (8, 8, 133), "instances": (8, 8, 100)}  # one-hot classes of every pixel of a patch
    uvim_1 = uvim_vit.Model(inputs=pixels, outputs=pixels, input_size=(64, 64), code_len=16)
    uvim_2 = vtt.Model(patches=ml_collections.ConfigDict({"size": (16, 16)}), num_heads=12, num_layers=12, mlp_dim=3072,
                       emb_dim=768, vocab_size=4096, seq_len=256, input_size=(512, 512))  # fmt: skip
    return {
        "vit_jax B/16": vit_jax("b16", representation_size=768),
        "vit_jax H/14": vit_jax("h14", representation_size=1280),
        "vit_jax R50+B/16": vit_jax("r50_b16", representation_size=768),
        "vit_jax B/16 fine-tuned": vit_jax("b16", 384, 1000),
        "AugReg Ti/16": vit_jax("ti16"),
        "AugReg R26+S/32": vit_jax("r26_s32"),
        "AugReg R+Ti/16": vit_jax("r_ti16"),
        "SAM B/16": vit_jax("b16", 224, 1000, representation_size=768),
        "GSAM B/16": vit_jax("b16_gap_norep", 224, 1000),
        "MLP-Mixer B/16": tree(models_mixer.MlpMixer(num_classes=1000, **mixer), (1, 224, 224, 3), train=False),
        "plain S/16": big_vision("S/16", pool_type="gap", posemb="sincos2d", rep_size=True, num_classes=1000),
        "DeiT III B/16": big_vision("B/16", 384, pool_type="tok", num_classes=1000),
        "FlexiViT-B": big_vision("B/32", pool_type="gap", num_classes=1000),  # its class has the same arrays
        "SigLIP B/16": {**big_vision("B/16", 256, **siglip), **text("siglip.npz")},
        "SigLIP So400m/14": {**big_vision("So400m/14", 384, **siglip), **text("siglip.npz")},
        "SigLIP 2 g-opt/16": {**big_vision("g-opt/16", 384, scan=True, **siglip), **text("siglip2.npz")},
        "SigLIP 2 NaFlex B/16": {**tree(naflex, patches, prefix="params/img/"), **text("siglip2_naflex.npz")},
        "LiT B16B": {**vit_jax("b16", 224, 768, prefix="img/"), **text("lit_bert.npz")},
        "LiT L16S": {**vit_jax("l16", 224, None, prefix="img/"), **text("lit_text.npz")},
        "LiT of big_vision B/16": {**big_vision("B/16", num_classes=768, pool_type="tok", prefix="params/img/"),
                                   **text("lit_big_vision.npz")},
        "CLIPPO B/16": tree(one_tower.Model(image=clippo, out_dim=768), (1, 224, 224, 3), (1, 224, 224, 3),
                            prefix="params/"),
        "PaliGemma 3B": {**big_vision("So400m/14", **paligemma), **text("paligemma.npz")},
        "PaliGemma 2 3B": {**big_vision("So400m/14", 448, **{**paligemma, "num_classes": 2304}),
                           **text("paligemma2.npz")},
        "UViM stage I": tree(uvim_1, {name: jnp.zeros((1, 64, *shape)) for name, shape in pixels.items()},
                             collections=("params", "state")),
        "UViM stage II": tree(uvim_2, (1, 512, 512, 3), tokens, prefix="params/"),
        "GIVT": tree(givt.Model(num_decoder_layers=4, out_dim=16, seq_len=16), (1, 16, 16), jnp.zeros((1,), jnp.int32)),
        "GIVT of images": tree(givt.Model(num_layers=4, num_decoder_layers=4, out_dim=16, num_labels=None,
                                          seq_len=16), (1, 16, 16), image=jnp.zeros((1, 256, 256, 3))),
        "VAE of GIVT (convolutions)": tree(cnn.Model(channel_multipliers=[1, 2], codeword_dim=16, code_len=256),
                                           (1, 32, 32, 3)),
        "VAE of GIVT (ViT)": tree(givt_vit.Model(input_size=(64, 64), code_len=16, codeword_dim=16,
                                                 inout_specs={"semantics": (0, 133), "instances": (1, 100)}),
                                  jnp.zeros((1, 64, 64, 2), jnp.int32)),
        "CapPa B/16": tree(cappa.Model(num_layers=12, decoder_num_layers=6, num_heads=12, mlp_dim=3072, emb_dim=768),
                           (1, 224, 224, 3), tokens),
        "Jet": tree(jet.Model(depth=4), (1, 64, 64, 3), method="forward"),
        "text tower": tree(text_transformer.Model(num_classes=768, width=192, depth=2, mlp_dim=768, num_heads=3),
                           tokens),
        "BiT R152x2": tree(bit_paper.Model(depth=152, width=2, num_classes=1000), (1, 224, 224, 3)),
        "BiT R101x3": tree(bit_paper.Model(depth=101, width=3, num_classes=397), (1, 224, 224, 3)),
        "JetFormer": tree(jetformer.Model(**jetformer_sizes), jnp.zeros((1, 4), jnp.int32), (1, 16, 16),
                          jnp.zeros((1,), bool)),
    }  # fmt: skip


def collapse(arrays: dict[str, list[int]]) -> dict[str, list[int]]:
    """One line for arrays that differ only in the number of their block."""
    groups: dict[tuple, list[str]] = {}
    for name, shape in arrays.items():
        groups.setdefault((re.sub(r"(?<=[bB]lock_)\d+", "{}", name, count=1), tuple(shape)), []).append(name)
    collapsed = {}
    for (pattern, shape), names in groups.items():
        numbered = "{}" in pattern and set(names) == {pattern.replace("{}", str(i)) for i in range(len(names))}
        names = [pattern.replace("{}", f"{{{len(names)}}}")] if numbered else names
        collapsed |= {name: list(shape) for name in names}
    return collapsed


if __name__ == "__main__":
    lines = [f"{json.dumps(family)}: {{\n" + ",\n".join(f"  {json.dumps(name)}: {json.dumps(shape)}"
             for name, shape in collapse(arrays).items()) + "\n}" for family, arrays in families().items()]  # fmt: skip
    (HERE / "trees.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")
