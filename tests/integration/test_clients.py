"""Models as parts of other libraries: depth and pose on the backbone, PEFT, timm's optimizer factory, scripts."""

import re

import peft
import pytest
import torch
import transformers

from hf_vit import HfViTBackbone, HfViTConfig, HfViTModel
from hf_vit.training.optimization import kernel_names, layer_of

from ..tiny_models import TINY, images, randomize, tiny, tiny_bit

PLAIN = {**TINY, "hidden_size": 16, "image_size": (24, 36), "patch_size": 6}
STAGES = [0, 1, 2, 3]


def backbone_config(**changes) -> HfViTConfig:
    return HfViTConfig(**{**PLAIN, "out_indices": STAGES, "reshape_hidden_states": False, **changes})


@pytest.mark.parametrize("apply_layernorm", [True, False])
def test_tokens_of_the_backbone_are_the_hidden_states(apply_layernorm):
    """transformers records hidden states itself, with hooks; the reshaped maps are the same patches."""
    model = randomize(HfViTModel(HfViTConfig(**PLAIN)), std=0.1).eval()
    pixel_values = images(model)
    states = model(pixel_values, output_hidden_states=True).hidden_states
    for reshapes in (False, True):
        config = backbone_config(apply_layernorm=apply_layernorm, reshape_hidden_states=reshapes)
        backbone = HfViTBackbone(config).eval()
        backbone.load_state_dict(model.state_dict(), strict=False)
        maps = backbone(pixel_values).feature_maps
        for found, expected in zip(maps, states, strict=True):
            if apply_layernorm:
                expected = model.layernorm(expected)
            if reshapes:  # 24 / 6 rows and 36 / 6 columns behind the class token
                expected = expected[:, 1:].reshape(2, 4, 6, 16).permute(0, 3, 1, 2)
            torch.testing.assert_close(found, expected)


NECK = {"neck_hidden_sizes": [8] * 4, "fusion_hidden_size": 8, "backbone_config": backbone_config()}
HEADS = {
    "dpt": lambda: transformers.DPTForDepthEstimation(
        transformers.DPTConfig(**NECK, is_hybrid=False, hidden_size=16, image_size=24, patch_size=6)
    ),
    "depth_anything": lambda: transformers.DepthAnythingForDepthEstimation(
        transformers.DepthAnythingConfig(**NECK, reassemble_hidden_size=16, patch_size=6, head_hidden_size=8)
    ),
    "zoedepth": lambda: transformers.ZoeDepthForDepthEstimation(
        transformers.ZoeDepthConfig(
            **NECK,
            backbone_hidden_size=16,
            bottleneck_features=8,
            patch_size=6,
            bin_configurations=[{"n_bins": 4, "min_depth": 0.001, "max_depth": 10.0}],
        )
    ),
    "vitpose": lambda: transformers.VitPoseForPoseEstimation(
        transformers.VitPoseConfig(
            backbone_config=backbone_config(pooling="mean", out_indices=[3], patch_size=(6, 6)), num_labels=5
        )
    ),
}


@pytest.mark.parametrize("head", HEADS)
def test_heads_that_take_tokens(head, tmp_path):
    """Of square images, because DPT's head takes no other; VitPose's takes those of the configured size."""
    torch.manual_seed(0)
    model = HEADS[head]().eval()
    pixel_values = torch.randn(2, 3, 24, 36 if head == "vitpose" else 24)
    outputs = model(pixel_values)
    if head == "vitpose":
        assert outputs.heatmaps.shape == (2, 5, 16, 24)  # four times the grid of 4 x 6
    else:
        assert outputs.predicted_depth.shape[0] == 2
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    torch.testing.assert_close(again(pixel_values)[0], outputs[0])


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_dropped_patches_are_as_if_masked(pooling):
    """Attention that ignores the other tokens, at their positions, gives the kept ones the same values."""
    model = tiny(pooling=pooling).vit
    pixel_values = images(model)
    keep = torch.tensor([[0, 5, 17], [28, 3, 29]])
    mask = torch.zeros(2, 30, dtype=torch.int64).scatter(1, keep, 1)
    prefix = model.config.num_prefix_tokens
    mask = torch.nn.functional.pad(mask, (prefix, 0), value=1)
    expected = model(pixel_values, attention_mask=mask)
    found = model(pixel_values, keep=keep)
    rows = torch.nn.functional.pad(keep + prefix, (prefix, 0)).unsqueeze(-1)
    torch.testing.assert_close(found.last_hidden_state, expected.last_hidden_state.take_along_dim(rows, 1))
    torch.testing.assert_close(found.pooler_output, expected.pooler_output)


def test_lora_on_the_patch_projection():
    """Merged into the weights, an adapter gives the same logits; PEFT replaces the convolution by its own module."""
    model = tiny()
    pixel_values = images(model)
    before = model(pixel_values).logits
    config = peft.LoraConfig(target_modules=["projection", "q_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(model, config).eval()
    expected = adapted(pixel_values=pixel_values).logits
    assert (expected - before).abs().max() > 1e-3
    merged = adapted.merge_and_unload()
    torch.testing.assert_close(merged(pixel_values).logits, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("build", [tiny_bit, lambda: tiny(hybrid=True)])
def test_lora_on_standardized_convolutions_is_refused(build):
    with pytest.raises(ValueError, match="modules_to_save"):
        peft.get_peft_model(build(), peft.LoraConfig(target_modules=["conv1"]))


@pytest.mark.parametrize("build", [tiny, lambda: tiny(hybrid=True), lambda: tiny(pooling="map"), tiny_bit])
def test_patterns_for_timms_optimizer_factory(build):
    """timm's `group_with_matcher`: stem 0, then the numbers, and what no pattern matches last."""
    model = build()
    matcher = model.group_matcher()
    last = max(layer_of(name, -1) for name, _ in model.named_parameters()) + 1
    for name, _ in model.named_parameters():
        found = re.match(matcher["blocks"], name)
        number = last if found is None else int(found[1]) + 1
        assert (0 if re.match(matcher["stem"], name) else number) == layer_of(name, last - 1), name
    assert model.no_weight_decay() == {name for name, _ in model.named_parameters()} - kernel_names(model)


def test_arguments_and_fields_of_transformers_scripts(tmp_path):
    """`run_image_classification.py` passes finetuning_task; `run_mim.py` reads and writes encoder_stride."""
    model = tiny(patch_size=(4, 4))
    model.save_pretrained(tmp_path)
    config = HfViTConfig.from_pretrained(tmp_path, finetuning_task="image-classification", use_auth_token=None)
    assert config.encoder_stride == 4
    config.update({"image_size": (16, 24), "patch_size": 4, "encoder_stride": 4})
    with pytest.raises(ValueError, match="encoder_stride"):
        config.update({"encoder_stride": 8})
    assert tiny(hybrid=True).config.encoder_stride
