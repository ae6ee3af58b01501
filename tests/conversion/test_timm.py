"""What timm's config.json states, against timm's own logits and pixels (tests/goldens_peers/make_timm_folders.py)."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import hf_vit
from hf_vit.conversion import ConversionError, convert

from ..comparing import logits
from ..paths import PEERS

with np.load(PEERS / "timm_folders.npz") as stored:
    GOLDENS = dict(stored)
FOLDERS = sorted({name.split("/")[0] for name in GOLDENS if "/weights/" in name})
EVALUATIONS = sorted({name.split("/")[0] for name in GOLDENS if name.startswith("evaluation")})


def config_of(case):
    return json.loads(str(GOLDENS[f"{case}/config"]))


def weights_of(case):
    prefix = f"{case}/weights/"
    return {name.removeprefix(prefix): torch.from_numpy(GOLDENS[name]) for name in GOLDENS if name.startswith(prefix)}


def write_folder(folder, weights, config):
    folder.mkdir()
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("case", FOLDERS)
def test_logits_are_timms(tmp_path, case):
    model, _ = convert(write_folder(tmp_path / "timm", weights_of(case), config_of(case)))
    theirs = torch.from_numpy(GOLDENS[f"{case}/logits"])
    pixel_values = torch.from_numpy(GOLDENS[f"{case}/pixel_values"]).float()
    torch.testing.assert_close(logits(model, pixel_values), theirs, rtol=0, atol=1e-5 * float(theirs.abs().max()))


@pytest.mark.parametrize("layout", ["nested", "overlay", "flat"])  # flat: of timm before 2023
@pytest.mark.parametrize("case", EVALUATIONS)
def test_pixels_are_timms(tmp_path, case, layout):
    evaluation = config_of(case)
    height, width = evaluation["input_size"][1:]
    weights = weights_of("a class token and 3 x 5 patches, not 4 x 4")
    del weights["pos_embed"]
    config = {"architecture": "vit_tiny_patch16_224", "model_args": {"embed_dim": 18, "pos_embed": "none"}}
    if layout == "nested":
        config["pretrained_cfg"] = evaluation
    elif layout == "overlay":
        config |= {"pretrained_cfg": {**evaluation, "crop_pct": 0.5}, "pretrained_cfg_overlay": evaluation}
    else:
        config |= evaluation
    _, processor = convert(write_folder(tmp_path / "timm", weights, config), image_size=(height, width))
    ours = processor(GOLDENS["image"], return_tensors="np").pixel_values[0]
    np.testing.assert_allclose(ours, GOLDENS[f"{case}/pixel_values"], rtol=0, atol=1e-6)


PLAIN = "a class token and 3 x 5 patches, not 4 x 4"


def test_pixels_that_the_patches_do_not_use_are_named(tmp_path):
    """timm's PatchEmbed drops them: 14 x 22 pixels are 3 x 5 patches of 4."""
    config = config_of(PLAIN) | {"model_args": {"embed_dim": 18, "img_size": [14, 22]}}
    model, _ = convert(write_folder(tmp_path / "timm", weights_of(PLAIN), config))
    assert model.config.image_size == (12, 20)
    assert any("14 x 22" in sentence for sentence in model.conversion_record["assumed"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "vit_base_patch16_rpn_224"}, "residual post-norm"),
        ({"architecture": "vit_small_patch14_reg4_dinov2"}, "register tokens"),
        ({"architecture": "vit_base_patch16_clip_224"}, "LayerNorm before"),
        ({"architecture": "aimv2_large_patch14_224"}, "SwiGLU"),
        ({"architecture": "resnetv2_50d"}, "BiT"),
        ({"num_classes": 6}, "num_labels 6"),
        ({"model_args": {"img_size": [16, 20]}}, "20 positions|21 positions"),
        ({"model_args": {"embed_dim": 19, "img_size": [12, 20]}}, "hidden_size 19"),
        ({"model_args": {"patch_size": 8, "img_size": [12, 20]}}, "patch_size 8"),
        ({"model_args": {"block_fn": "ResPostBlock", "img_size": [12, 20]}}, "block_fn"),
        ({"pretrained_cfg": {"input_size": [3, 12, 20], "crop_mode": "border"}}, "border"),
        ({"pretrained_cfg": {"input_size": [3, 12, 20], "interpolation": "random"}}, "random"),
    ],
    ids=str,
)
def test_what_hf_vit_lacks_or_what_the_arrays_contradict_is_refused(tmp_path, changes, message):
    folder = write_folder(tmp_path / "timm", weights_of(PLAIN), config_of(PLAIN) | changes)
    with pytest.raises(ConversionError, match=message):
        convert(folder)


@pytest.mark.parametrize(
    ("case", "options", "message"),
    [
        (PLAIN, {"num_attention_heads": 3}, "position_grid"),  # 16 positions: 4 x 4, or a class token and 3 x 5
        (PLAIN, {"position_grid": (3, 5)}, "num_attention_heads"),  # no published model has 18 channels
    ],
)
def test_a_bare_file_that_can_be_two_models_is_refused(tmp_path, case, options, message):
    save_file(weights_of(case), tmp_path / "bare.safetensors")
    with pytest.raises(ConversionError, match=message):
        convert(tmp_path / "bare.safetensors", **options)


def test_a_folder_of_transformers_timm_wrapper_is_a_folder_of_timm(tmp_path):
    """Trainer saves a model of timm so: its own names of arrays, and `model_type` beside `architecture`."""
    weights, config = weights_of(PLAIN), config_of(PLAIN)
    plain, _ = convert(write_folder(tmp_path / "timm", weights, config))
    wrapped = {**config, "model_type": "timm_wrapper", "architectures": ["TimmWrapperForImageClassification"]}
    model, _ = hf_vit.load(write_folder(tmp_path / "wrapped", weights, wrapped))
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=0, atol=0)
