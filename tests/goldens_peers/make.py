"""Makes the checkpoints of this folder, and expected.npz: what timm and torchvision compute from them.

    pip install torch==2.13.0 timm==1.0.31 && pip install --no-deps torchvision==0.28.0
    python tests/goldens_peers/make.py

DeiT, MAE and DINO name their arrays as timm does and compute the same; their files differ in what is around them.
"""

import argparse
import json
from functools import partial
from pathlib import Path

import numpy as np
import torch

# A build of torchvision for another torch imports once these operators exist; none of them is called here.
LIBRARY = torch.library.Library("torchvision", "DEF")
LIBRARY.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
LIBRARY.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

from safetensors.torch import save_file  # noqa: E402
from timm.layers import HybridEmbed, StdConv2d, StdConv2dSame  # noqa: E402
from timm.models import create_model  # noqa: E402
from timm.models._hub import save_for_hf  # noqa: E402
from timm.models.resnetv2 import ResNetV2  # noqa: E402
from timm.models.vision_transformer import VisionTransformer  # noqa: E402
from torchvision.models import VisionTransformer as TorchvisionViT  # noqa: E402

HERE = Path(__file__).parent
SIZES = {"embed_dim": 14, "depth": 2, "num_heads": 2, "mlp_ratio": 22 / 14, "num_classes": 11}
PLAIN = {**SIZES, "img_size": (20, 36), "patch_size": 4}
FOLDER = {**PLAIN, "act_layer": "gelu_tanh"}
PROCESSING = {"mean": [0.4, 0.5, 0.6], "std": [0.2, 0.3, 0.4], "crop_pct": 0.8, "interpolation": "bilinear"}
HEADS = {"num_attention_heads": 2}
GRID = {**HEADS, "position_grid": (5, 9)}

plain = partial(VisionTransformer, **PLAIN)
root = partial(create_model, "vit_tiny_r_s16_p8_224", img_size=16, patch_size=2, **{**SIZES, "depth": 1})
torchvision = partial(TorchvisionViT, 20, 4, 2, 2, 14, 22, num_classes=11, representation_size=17)


def hybrid() -> VisionTransformer:
    """A hybrid as timm's _resnetv2 builds it, with one narrow unit."""
    options = {"num_classes": 0, "global_pool": "", "preact": False, "stem_type": "same"}
    conv_layer = partial(StdConv2dSame, eps=1e-8)
    backbone = ResNetV2(layers=(1,), channels=(128,), stem_chs=32, conv_layer=conv_layer, **options)
    embed = partial(HybridEmbed, backbone=backbone, proj=True)
    return VisionTransformer(**{**SIZES, "depth": 1}, img_size=(12, 20), patch_size=1, embed_layer=embed)


def bit() -> ResNetV2:
    """A narrow BiT as timm's _create_resnetv2_bit builds it."""
    options = {"stem_chs": 32, "stem_type": "fixed", "conv_layer": partial(StdConv2d, eps=1e-8)}
    return ResNetV2(layers=(1, 2), channels=(128, 256), num_classes=11, **options)


# name: (model, what the file holds besides the weights, arguments of `convert`)
MODELS = {
    "timm_plain.safetensors": (plain, None, GRID),
    "timm_no_embed_class.safetensors": (partial(plain, no_embed_class=True, qkv_bias=False), None, GRID),
    "timm_gap.safetensors": (partial(plain, global_pool="avg"), None, GRID),
    "timm_gap_siglip.safetensors": (partial(plain, global_pool="avg", class_token=False, fc_norm=False), None, GRID),
    "timm_map.safetensors": (partial(plain, global_pool="map", class_token=False), None, GRID),
    "timm_root.safetensors": (root, None, HEADS),
    "timm_hybrid.safetensors": (hybrid, None, {**HEADS, "position_grid": (3, 5)}),
    "deit.pth": (plain, "deit", GRID),
    "mae.pth": (partial(plain, num_classes=0), "mae", GRID),
    "dino.pth": (partial(plain, num_classes=0), "dino", GRID),
    "torchvision.pth": (torchvision, None, HEADS),
    "timm_folder": (partial(create_model, "vit_tiny_patch16_224", **FOLDER), None, {"position_grid": (5, 9)}),
    "timm_bit.safetensors": (bit, None, {"image_size": (43, 64)}),
}


def randomize(model: torch.nn.Module) -> torch.nn.Module:
    """Random numbers that float16 holds exactly, as large as those of trained models."""
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
        parameter.data = parameter.data.half().float()
    return model.eval()


def surround(weights: dict[str, torch.Tensor], kind: str | None) -> dict:
    """As the scripts of DeiT, MAE and DINO save them."""
    if kind == "deit":
        return {"model": weights}
    if kind == "mae":
        decoder = {"mask_token": torch.ones(1, 1, 6), "decoder_embed.weight": torch.ones(6, 14)}
        return {"model": weights | decoder, "args": argparse.Namespace(mask_ratio=0.75)}
    if kind == "dino":
        backbone = {f"module.backbone.{name}": array for name, array in weights.items()}
        heads = {"module.head.mlp.0.weight": torch.ones(5, 14), "module.head.last_layer.weight_v": torch.ones(3, 5)}
        settings = argparse.Namespace(arch="vit_small")
        return {"student": {}, "teacher": backbone | heads, "epoch": 100, "args": settings}
    return weights


def image_shape(model: torch.nn.Module) -> tuple[int, ...]:
    if isinstance(model, ResNetV2):
        return 2, 3, 43, 64
    size = model.image_size if isinstance(model, TorchvisionViT) else model.patch_embed.img_size
    return (2, 3, *((size, size) if isinstance(size, int) else size))


def main() -> None:
    torch.manual_seed(0)
    expected: dict[str, np.ndarray] = {}
    for name, (build, kind, _) in MODELS.items():
        model = randomize(build())
        weights = {key: value.half().contiguous() for key, value in model.state_dict().items()}
        if name == "timm_folder":  # its config.json says what the arrays do not
            save_for_hf(model, HERE / name, model_args=FOLDER, model_config={"pretrained_cfg": PROCESSING})
        elif name.endswith(".pth"):
            torch.save(surround(weights, kind), HERE / name)
        else:
            save_file(weights, HERE / name)
        expected |= {f"{name}/logits": compute(model, expected)}
    np.savez_compressed(HERE / "expected.npz", **expected)
    index = {name: arguments for name, (_, _, arguments) in MODELS.items()}
    (HERE / "index.json").write_text(json.dumps(index, indent=2) + "\n")


@torch.no_grad()
def compute(model: torch.nn.Module, expected: dict[str, np.ndarray]) -> np.ndarray:
    """Logits; models of the same size see the same pixels, which become part of `expected`."""
    shape = image_shape(model)
    pixel_values = expected.setdefault(f"pixel_values_{shape[2]}x{shape[3]}", torch.randn(shape).half().numpy())
    return model(torch.from_numpy(pixel_values).float()).numpy()


if __name__ == "__main__":
    main()
