"""What timm's config.json states, against timm's own logits and pixels (tests/goldens_peers/make_timm_folders.py)."""

import io
import json
import re
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

import hf_vit
from hf_vit import HfBiTConfig, HfBiTForImageClassification, HfViTImageProcessor
from hf_vit.conversion import ConversionError, convert, export
from hf_vit.conversion.tables import IMAGENET
from hf_vit.conversion.timm import architecture_in, architectures
from hf_vit.models.sizes import as_pair

from ..comparing import logits
from ..paths import PEERS
from ..tiny_models import tiny

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


def hybrid(depths, patch_size, width=64):
    stride = 32 if len(depths) == 4 else 16
    size = tuple(2 * side * (stride if depths else 2) for side in patch_size)
    return {"hybrid": True, "stem_depths": depths, "patch_size": patch_size, "image_size": size, "stem_width": width}


# Fields of `tiny`, and the relative tolerance: timm has one value for epsilons and for weight standardization.
STRUCTURES = {
    "cls": ({}, 1e-6),
    "mean": ({"pooling": "mean"}, 1e-6),
    "mean of all tokens": ({"pooling": "mean", "use_cls_token": True}, 1e-6),
    "mean of the patches": ({"pooling": "mean", "use_cls_token": True, "pool_patches_only": True}, 1e-6),
    "norm after the mean": ({"pooling": "mean", "norm_after_pooling": True}, 1e-6),
    "map": ({"pooling": "map"}, 1e-6),
    "map of all tokens": ({"pooling": "map", "use_cls_token": True}, 1e-6),
    "map of the patches": ({"pooling": "map", "use_cls_token": True, "pool_patches_only": True}, 1e-6),
    "none": ({"pooling": "none", "use_cls_token": True}, 1e-6),
    "no positions": ({"position_embedding_type": "none"}, 1e-6),
    "no position of the class token": ({"no_embed_class": True}, 1e-6),
    "no position of the class token, 3 x 5 patches": ({"no_embed_class": True, "image_size": (12, 30)}, 1e-6),
    "mean of all tokens, one without a position": (
        {"pooling": "mean", "use_cls_token": True, "no_embed_class": True},
        1e-6,
    ),
    "R26 with a class token without a position": ({**hybrid([2, 2, 2, 2], (2, 2)), "no_embed_class": True}, 1e-4),
    "no bias": ({"qkv_bias": False}, 1e-6),
    "relu": ({"hidden_act": "relu"}, 1e-6),
    "5 channels": ({"num_channels": 5}, 1e-6),
    "3 x 5 patches": ({"image_size": (12, 30)}, 1e-6),
    "epsilon": ({"layer_norm_eps": 1e-12}, 1e-4),
    "bare stem, patches of 8": (hybrid([], (8, 8)), 1e-4),
    "bare stem, patches of 4": (hybrid([], (4, 4)), 1e-4),
    "bare stem, patches of 1 x 2": (hybrid([], (1, 2)), 1e-4),
    "R26, patches of 1": (hybrid([2, 2, 2, 2], (1, 1)), 1e-4),
    "R26, patches of 2": (hybrid([2, 2, 2, 2], (2, 2)), 1e-4),
    "R50 of 3 stages, patches of 2": (hybrid([3, 4, 9], (2, 2)), 1e-4),
}


def write_structure(folder, fields):
    """Export a tiny model with random statistics of the pixels; return the model and its image processor."""
    model = tiny(**fields)
    channels = model.config.num_channels
    statistics = {
        "image_mean": [0.3, 0.4, 0.5, 0.6, 0.7][:channels],
        "image_std": [0.2, 0.25, 0.3, 0.35, 0.4][:channels],
    }
    processor = HfViTImageProcessor.for_model(model.config, preset="transformers", **statistics)
    export(model, folder, "timm", processor=processor)
    return model, processor


def relative_difference(ours, theirs):
    assert ours.shape == theirs.shape
    return float((ours - theirs).abs().max() / theirs.abs().max())


@pytest.mark.parametrize("structure", STRUCTURES)
def test_what_is_written_is_read_again(tmp_path, structure):
    fields, tolerance = STRUCTURES[structure]
    model, processor = write_structure(tmp_path / "timm", fields)
    again, processor_again = convert(tmp_path / "timm")
    pixel_values = images_for(model)
    assert relative_difference(logits(again, pixel_values), logits(model, pixel_values)) < tolerance
    assert as_pair(again.config.image_size) == as_pair(model.config.image_size)
    if model.config.num_channels == 3:
        image = GOLDENS["image"]
        ours, theirs = (each(image, return_tensors="np").pixel_values for each in (processor_again, processor))
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_timm_computes_what_is_written(tmp_path, timm, structure):
    fields, tolerance = STRUCTURES[structure]
    model, _ = write_structure(tmp_path / "timm", fields)
    theirs = timm.create_model(f"local-dir:{tmp_path}/timm", pretrained=True).eval()
    pixel_values = images_for(model)
    with torch.no_grad():
        assert relative_difference(theirs(pixel_values), logits(model, pixel_values)) < tolerance


def images_for(model):
    torch.manual_seed(5)
    return torch.randn(2, model.config.num_channels, *model.config.image_size)


@pytest.mark.parametrize(
    ("fields", "classifier", "first_convolution"),
    [
        ({}, "head", "patch_embed.proj"),
        (hybrid([2, 2, 2, 2], (1, 1)), "head", "patch_embed.backbone.stem.conv"),
        (hybrid([], (8, 8)), "head", "patch_embed.backbone.conv"),
        ("BiT", "head.fc", "stem.conv"),
    ],
    ids=["ViT", "hybrid", "bare stem", "BiT"],
)
class TestAdaptation:
    """timm's `num_classes` and `in_chans` need the names of the head and of the first convolution."""

    def write(self, folder, fields):
        if fields == "BiT":
            export(HfBiTForImageClassification(HfBiTConfig(num_labels=11, image_size=64)), folder, "timm")
        else:
            write_structure(folder, fields)

    def test_head_and_first_convolution_are_named(self, tmp_path, fields, classifier, first_convolution):
        self.write(tmp_path / "timm", fields)
        stated = json.loads((tmp_path / "timm" / "config.json").read_text())["pretrained_cfg"]
        weights = load_file(tmp_path / "timm" / "model.safetensors")
        assert (stated["classifier"], stated["first_conv"]) == (classifier, first_convolution)
        assert {f"{classifier}.weight", f"{first_convolution}.weight"} <= weights.keys()

    @pytest.mark.parametrize("arguments", [{"num_classes": 12}, {"num_classes": 0}, {"in_chans": 1}], ids=str)
    def test_timm_adapts_them(self, tmp_path, timm, fields, classifier, first_convolution, arguments):
        self.write(tmp_path / "timm", fields)
        model = timm.create_model(f"local-dir:{tmp_path}/timm", pretrained=True, **arguments)
        assert model.num_classes == arguments.get("num_classes", 11)


def test_a_stem_of_another_width_is_refused(tmp_path):
    with pytest.raises(ConversionError, match="stem_width=32"):
        export(tiny(**hybrid([2, 2, 2, 2], (1, 1), width=32)), tmp_path / "timm", "timm")


def photographs_of(shared):
    with zipfile.ZipFile(shared / "data/imagenet_sample/images.zip") as archive:
        names = [name for name in archive.namelist() if name.lower().endswith((".jpg", ".jpeg"))]
        assert len(names) == 104
        return [archive.read(name) for name in names]


def test_the_real_model_predicts_the_same_in_timm(shared, timm, tmp_path):
    """Ti/16 with the statistics of ImageNet, by timm's own transform and forward."""
    mean, std = (np.array(IMAGENET[name]) for name in ("image_mean", "image_std"))
    model, _ = convert(shared / "weights/Ti_16-imagenet2012-res_224.npz")
    with torch.no_grad():  # pixels are 2 * level - 1; here (level - mean) / std
        kernel = model.vit.embeddings.patch_embeddings.projection.weight.double()
        offset = torch.from_numpy(2 * mean - 1)[None, :, None, None]
        bias = model.vit.embeddings.patch_embeddings.projection.bias
        bias += (kernel * offset).sum((1, 2, 3)).float()
        model.vit.embeddings.patch_embeddings.projection.weight.copy_(
            kernel * torch.from_numpy(2 * std)[None, :, None, None]
        )
    processor = HfViTImageProcessor(size=224, preset="timm", **IMAGENET)
    export(model, tmp_path / "timm", "timm", processor=processor)
    theirs = timm.create_model(f"local-dir:{tmp_path}/timm", pretrained=True).eval()
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(theirs))
    for photograph in photographs_of(shared):
        image = Image.open(io.BytesIO(photograph)).convert("RGB")
        pixel_values = processor(image, return_tensors="pt").pixel_values
        with torch.no_grad():
            expected = theirs(transform(image)[None])
        torch.testing.assert_close(logits(model, pixel_values), expected, rtol=0, atol=1e-4)
        assert logits(model, pixel_values).argmax() == expected.argmax()


# All ViTs, hybrids and ResNetV2s of timm's registry: equal logits, or refused with what hf_vit lacks; none differs.
SWEEP = json.loads((Path(__file__).parent / "timm_architectures.json").read_text())
SAMPLE = ("test_vit", "deit_tiny_patch16_224", "deit3_small_patch16_224", "vit_tiny_r_s16_p8_224")


def test_the_list_of_architectures_is_complete():
    listed = [*SWEEP["equal"], *SWEEP["refused"], *SWEEP["untried"]]
    assert sorted(listed) == sorted(architectures())
    assert len(SWEEP["equal"]) >= 97


@pytest.mark.parametrize("name", SWEEP["refused"])
def test_a_refusal_names_the_architecture_and_what_hf_vit_lacks(name):
    with pytest.raises(ConversionError, match=re.escape(name)) as error:
        architecture_in({"architecture": name})
    assert SWEEP["refused"][name] in str(error.value)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in SAMPLE else pytest.mark.slow) for name in SWEEP["equal"]]
)
def test_an_architecture_computes_what_timm_does(tmp_path, timm, name):
    """Two blocks with random weights, in float64: the difference is not of rounding."""
    is_resnet = name.startswith("resnetv2")
    torch.manual_seed(0)
    theirs = timm.create_model(name, num_classes=5, **({} if is_resnet else {"depth": 2})).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.03 * torch.randn_like(parameter))
    timm.models.save_for_hf(theirs, tmp_path, safe_serialization=True)
    ours, _ = convert(tmp_path)
    pixel_values = torch.randn(1, *theirs.pretrained_cfg["input_size"], dtype=torch.float64)
    height, width = as_pair(ours.config.image_size)
    with torch.no_grad():
        expected = theirs.double()(pixel_values)
        # timm drops what the patches do not fill: of 384 pixels, 27 patches of 14 use 378
        found = ours.double()(pixel_values[..., :height, :width]).logits
    assert relative_difference(found, expected) < 1e-5
