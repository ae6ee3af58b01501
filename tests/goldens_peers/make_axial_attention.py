"""Makes axial_attention.npz: what the AxialAttention of csrhddlam/axial-deeplab computes, along columns and along rows.

    git clone https://github.com/csrhddlam/axial-deeplab && git -C axial-deeplab checkout 79088edb
    python tests/goldens_peers/make_axial_attention.py axial-deeplab

One image in training mode: its BatchNorm is then a GroupNorm of as many groups as channels. In float64.
"""

import importlib.util
import sys
import types
from pathlib import Path

import numpy as np
import torch
from torch import nn

CHANNELS, ROWS, COLUMNS = 48, 5, 7


def load_axialnet(checkout: Path):
    """lib/models/axialnet.py, which takes one name of its utils.py: a convolution of its own class."""
    package = types.ModuleType("package")
    package.__path__ = [str(checkout / "lib" / "models")]
    utils = types.ModuleType("package.utils")
    utils.qkv_transform = type("qkv_transform", (nn.Conv1d,), {})
    sys.modules |= {"package": package, "package.utils": utils}
    spec = importlib.util.spec_from_file_location("package.axialnet", checkout / "lib" / "models" / "axialnet.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main():
    torch.manual_seed(0)
    axialnet, arrays = load_axialnet(Path(sys.argv[1])), {}
    arrays["input"] = torch.randn(1, CHANNELS, ROWS, COLUMNS, dtype=torch.float64)
    for name, span, width in (("columns", ROWS, False), ("rows", COLUMNS, True)):
        module = axialnet.AxialAttention(CHANNELS, CHANNELS, groups=8, kernel_size=span, width=width).double().train()
        for norm in (module.bn_qkv, module.bn_similarity, module.bn_output):
            nn.init.normal_(norm.weight, 1, 0.5)
            nn.init.normal_(norm.bias, 0, 0.5)
        with torch.no_grad():
            arrays[f"{name}/output"] = module(arrays["input"])
        arrays |= {f"{name}/{key}": value for key, value in module.named_parameters()}
    np.savez_compressed(
        Path(__file__).with_name("axial_attention.npz"),
        **{name: array.detach().numpy() for name, array in arrays.items()},
    )


if __name__ == "__main__":
    main()
