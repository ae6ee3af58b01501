"""Make timm_folders.npz: what timm computes from the architecture and the settings that its config.json states.

pip install torch==2.13.0 timm==1.0.31 && pip install --no-deps torchvision==0.28.0
python tests/goldens_peers/make_timm_folders.py
"""

import json
from pathlib import Path

import numpy as np
import torch
from PIL import Image

# A build of torchvision for another torch imports once these operators exist; none of them is called here.
LIBRARY = torch.library.Library("torchvision", "DEF")
LIBRARY.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
LIBRARY.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

from timm.data import create_transform, resolve_data_config  # noqa: E402
from timm.models import create_model  # noqa: E402

SIZES = {"depth": 1, "mlp_ratio": 1.25, "num_classes": 5, "patch_size": 4}
# name: (architecture, arguments); what the arguments leave out, the architecture states
FOLDERS = {
    "heads, tanh, attention pooling": (
        "vit_giantopt_patch16_siglip_256",
        {"embed_dim": 32, "img_size": [12, 20], "act_layer": "gelu_tanh"},
    ),
    "heads of a mean-pooled model": ("vit_base_patch16_gap_224", {"embed_dim": 32, "img_size": [12, 20]}),
    "tanh": ("vit_so400m_patch16_siglip_gap_256", {"embed_dim": 32, "img_size": [12, 20]}),
    "a class token and 3 x 5 patches, not 4 x 4": ("vit_tiny_patch16_224", {"embed_dim": 18, "img_size": [12, 20]}),
    "4 x 4 patches without a class row, not 3 x 5": ("deit3_small_patch16_224", {"embed_dim": 18, "img_size": 16}),
    "layer scale": ("vit_small_patch14_dinov2", {"embed_dim": 18, "img_size": [12, 24]}),
    "the mean over patches, beside a class token": ("eva_large_patch14_196", {"embed_dim": 32, "img_size": [12, 24]}),
    "the mean with the class token": (
        "eva_large_patch14_196",
        {"embed_dim": 32, "img_size": [12, 24], "pool_include_prefix": True},
    ),
}
EVALUATIONS = [
    {"crop_mode": mode, "interpolation": interpolation, "crop_pct": crop_pct, "input_size": [3, height, width]}
    for mode, interpolation, crop_pct, height, width in (
        ("center", "bicubic", 0.9, 32, 32),
        ("center", "lanczos", 0.875, 32, 32),
        ("squash", "bicubic", 1.0, 32, 24),
        ("squash", "bilinear", 0.9, 24, 40),
        ("center", "nearest", 1.0, 32, 32),
        ("center", "box", 0.95, 32, 32),
        ("center", "hamming", 0.8, 24, 24),
    )
]


def make_folder(architecture: str, arguments: dict) -> dict[str, np.ndarray]:
    """Return a model's weights, an input and its logits, and the config.json that timm writes for it."""
    model = create_model(architecture, **arguments).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
        parameter.data = parameter.data.half().float()  # float16 holds them exactly
    height, width = model.patch_embed.img_size
    pixel_values = torch.randn(2, 3, height, width).half().float()
    with torch.no_grad():
        logits = model(pixel_values)
    config = {"architecture": architecture, "num_classes": 5, "global_pool": model.global_pool}
    config |= {"model_args": arguments, "pretrained_cfg": {"input_size": [3, height, width]}}
    arrays = {f"weights/{name}": tensor.half().numpy() for name, tensor in model.state_dict().items()}
    arrays |= {"pixel_values": pixel_values.half().numpy(), "logits": logits.numpy()}
    return {**arrays, "config": np.array(json.dumps(config))}


if __name__ == "__main__":
    torch.manual_seed(0)
    saved = {}
    for case, (architecture, arguments) in FOLDERS.items():
        for name, array in make_folder(architecture, SIZES | arguments).items():
            saved[f"{case}/{name}"] = array
    levels = np.random.default_rng(0).integers(0, 256, (9, 13, 3), np.uint8)
    image = Image.fromarray(levels).resize((65, 45), Image.Resampling.BICUBIC)
    saved["image"] = np.asarray(image)
    for number, evaluation in enumerate(EVALUATIONS):
        settings = {**evaluation, "mean": [0.4, 0.5, 0.6], "std": [0.2, 0.3, 0.4]}
        transform = create_transform(**resolve_data_config(pretrained_cfg=settings))
        saved[f"evaluation {number}/config"] = np.array(json.dumps(settings))
        saved[f"evaluation {number}/pixel_values"] = transform(image).numpy()
    np.savez_compressed(Path(__file__).parent / "timm_folders.npz", **saved)
