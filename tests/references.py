"""What models are compared with: published parameter counts, and BiT's forward in NumPy."""

import numpy as np

# No pre-logits layer, 224 pixels: vit_jax/models_test.py
VIT_PARAMETERS = {
    "Ti/16": 5_717_416,
    "S/16": 22_050_664,
    "S/32": 22_878_952,
    "B/8": 86_576_872,
    "B/16": 86_567_656,
    "B/32": 88_224_232,
    "L/16": 304_326_632,
    "L/32": 306_535_400,
    "H/14": 632_045_800,
    "R+Ti/16": 6_337_704,
    "R26+S/32": 36_431_912,
    "R26+B/32": 101_383_976,
    "R50+B/16": 98_659_112,
    "R50+L/32": 328_994_856,
    # the two that were never released, from the others: the same ResNet in front of the other Transformer
    "R50+B/32": 328_994_856 - (306_535_400 - 88_224_232) + (32 * 32 * 3 - 2048) * (1024 - 768),
    "R50+L/16": 98_659_112 + (304_326_632 - 86_567_656) - (16 * 16 * 3 - 1024) * (1024 - 768),
    "S/16-gap-norep": 22_049_896,
    "S/32-gap-norep": 22_878_184,
    "B/16-gap-norep": 86_566_120,
    "B/32-gap-norep": 88_222_696,
}

# Those with a source: `resnetv2_*_bit` in timm 1.0.31.
BIT_PARAMETERS = {
    "R50x1": 25_549_352,  # timm
    "R50x2": 97_988_712,
    "R50x3": 217_319_080,  # timm
    "R101x1": 44_541_480,  # timm
    "R101x3": 387_934_888,  # timm
    "R152x1": 60_185_128,
    "R152x2": 236_335_208,  # timm
    "R152x4": 936_533_224,  # timm
    "R200x3": 568_633_000,
}

# BiT in float64 NumPy, written from the papers' description, sharing nothing with the package.
# Maps are (height, width, channels), kernels (rows, columns, in, out), as in the JAX checkpoints.


def pads(size: int, kernel: int, stride: int, padding: str) -> tuple[int, int]:
    if padding == "fixed":
        return (kernel - 1) // 2, (kernel - 1) // 2
    total = max((-(-size // stride) - 1) * stride + kernel - size, 0)
    return total // 2, total - total // 2


def windows(image, kernel, stride, padding, value=0.0):
    """(rows, columns, channels, kernel, kernel)"""
    border = [pads(size, kernel, stride, padding) for size in image.shape[:2]]
    image = np.pad(image, [*border, (0, 0)], constant_values=value)
    return np.lib.stride_tricks.sliding_window_view(image, (kernel, kernel), (0, 1))[::stride, ::stride]


def convolve(image, kernel, stride, numbers):
    mean, variance = kernel.mean(axis=(0, 1, 2)), kernel.var(axis=(0, 1, 2))
    eps = numbers["weight_standardization_eps"]
    is_std = numbers["weight_standardization_form"] == "std"
    kernel = (kernel - mean) / (np.sqrt(variance) + eps if is_std else np.sqrt(variance + eps))
    return np.einsum("rcikl,klio->rco", windows(image, len(kernel), stride, numbers["padding"]), kernel)


def group_norm(image, scale, bias, numbers):
    groups = image.reshape(*image.shape[:2], 32, -1)
    mean = groups.mean(axis=(0, 1, 3), keepdims=True)
    variance = groups.var(axis=(0, 1, 3), keepdims=True)
    groups = (groups - mean) / np.sqrt(variance + numbers["group_norm_eps"])
    return groups.reshape(image.shape) * scale.reshape(-1) + bias.reshape(-1)


def relu(image):
    return np.maximum(image, 0)


def max_pool(image, numbers):
    value = 0.0 if numbers["pool_padding"] == "zero" else -np.inf
    return windows(image, 3, 2, numbers["padding"], value).max(axis=(3, 4))


def resnet(arrays: dict[str, np.ndarray], image: np.ndarray, depths: list[int], numbers: dict) -> np.ndarray:
    """The logits of one image.

    Args:
        arrays: in the names of bit_paper.py ("preactivation") or bit.py ("bottleneck"), big_vision.
        numbers: fields of HfBiTConfig.
    """
    arrays = {name: array.astype(np.float64) for name, array in arrays.items()}
    pre = numbers["layer_type"] == "preactivation"

    def norm(image, name):
        return group_norm(image, arrays[f"{name}/scale"], arrays[f"{name}/bias"], numbers)

    def conv(image, name, stride=1):
        return convolve(image, arrays[f"{name}/kernel"], stride, numbers)

    def unit(image, name, stride):
        if pre:
            active = relu(norm(image, f"{name}/gn1"))
            residual = conv(active, f"{name}/conv_proj", stride) if f"{name}/conv_proj/kernel" in arrays else image
            hidden = relu(norm(conv(active, f"{name}/conv1"), f"{name}/gn2"))
            hidden = relu(norm(conv(hidden, f"{name}/conv2", stride), f"{name}/gn3"))
            return residual + conv(hidden, f"{name}/conv3")
        residual = image
        if f"{name}/conv_proj/kernel" in arrays:
            residual = norm(conv(image, f"{name}/conv_proj", stride), f"{name}/gn_proj")
        hidden = relu(norm(conv(image, f"{name}/conv1"), f"{name}/gn1"))
        hidden = relu(norm(conv(hidden, f"{name}/conv2", stride), f"{name}/gn2"))
        return relu(residual + norm(conv(hidden, f"{name}/conv3"), f"{name}/gn3"))

    image = conv(image, "root_block/conv_root" if pre else "conv_root", 2)
    image = max_pool(image if pre else relu(norm(image, "gn_root")), numbers)
    for stage, depth in enumerate(depths):
        for index in range(depth):
            number = f"{index + 1:02d}" if pre else str(index + 1)
            image = unit(image, f"block{stage + 1}/unit{number}", 2 if stage and not index else 1)
    image = relu(norm(image, "norm-pre-head")) if pre else image
    return image.mean(axis=(0, 1)) @ arrays["head/kernel"] + arrays["head/bias"]
