"""BiT checkpoints of big_transfer, big_vision, timm and transformers, and back."""

import json

import numpy as np
import pytest
import torch
import transformers

from hf_vit import HfBiTConfig, HfBiTForImageClassification, HfBiTModel
from hf_vit.cli import main
from hf_vit.conversion import ConversionError, convert, export
from hf_vit.models.configuration_hf_bit import ORIGINALS

from ..comparing import assert_same_file, assert_same_weights, change_json, logits, read_arrays
from ..references import resnet
from ..tiny_models import BIT_PIXELS, SAME_PADDING, randomize, their_bit, tiny_bit

PIXELS_64 = BIT_PIXELS.double()


def as_big_transfer(arrays) -> dict[str, np.ndarray]:
    """Arrays of bit_paper.py with names and shapes of gs://bit_models; convolutions are numbered as in some files."""
    renamed = {
        "resnet/root_block/standardized_conv2d/kernel": arrays["root_block/conv_root/kernel"],
        "resnet/group_norm/gamma": arrays["norm-pre-head/scale"].reshape(-1),
        "resnet/group_norm/beta": arrays["norm-pre-head/bias"].reshape(-1),
        "resnet/head/conv2d/kernel": arrays["head/kernel"][None, None],
        "resnet/head/conv2d/bias": arrays["head/bias"],
    }
    for name, array in arrays.items():
        block, *rest = name.split("/")
        if block.startswith("block"):
            unit, module, kind = rest
            letter = "a/proj" if module == "conv_proj" else "abc"[int(module[-1]) - 1]
            is_norm = module.startswith("gn")
            last = {"scale": "group_norm/gamma", "bias": "group_norm/beta"}.get(kind, "standardized_conv2d/kernel")
            renamed[f"resnet/{block}/{unit}/{letter}/{last}"] = array.reshape(-1) if is_norm else array
    return renamed


@pytest.fixture
def big_transfer(goldens, tmp_path):
    np.savez(tmp_path / "BiT-M-R50x1-ILSVRC2012.npz", **as_big_transfer(read_arrays(goldens / "bit_v2.npz")))
    return tmp_path / "BiT-M-R50x1-ILSVRC2012.npz"


def test_a_released_file_gives_big_transfers_logits(big_transfer, goldens):
    model, processor = convert(big_transfer)
    assert model.conversion_record["dialect"]["names"] == "big_transfer"
    assert (model.config.image_size, processor.preset, processor.size) == (480, "bit", {"height": 480, "width": 480})
    image = PIXELS_64[0].permute(1, 2, 0).numpy()
    theirs = resnet(read_arrays(goldens / "bit_v2.npz"), image, [1, 2], ORIGINALS["big_transfer"])
    np.testing.assert_allclose(logits(model.double(), PIXELS_64)[0].numpy(), theirs, rtol=0, atol=1e-12)


def test_numbered_convolutions_are_read(big_transfer, tmp_path):
    arrays = read_arrays(big_transfer)
    numbered = {
        name.replace("standardized_conv2d", f"standardized_conv2d_{index}") if "/unit" in name else name: array
        for index, (name, array) in enumerate(arrays.items())
    }
    np.savez(tmp_path / "numbered.npz", **numbered)
    assert_same_weights(convert(tmp_path / "numbered.npz")[0], convert(big_transfer)[0])


@pytest.mark.parametrize("dialect", [None, "big_transfer"])
def test_a_released_file_is_restored_bit_by_bit(big_transfer, tmp_path, dialect):
    export(convert(big_transfer)[0], tmp_path / "back.npz", "jax", dialect=dialect)
    assert_same_file(tmp_path / "back.npz", big_transfer)


@pytest.mark.parametrize("name", ["big_transfer", "bit_v1.npz"])
def test_an_untrained_head_is_dropped_and_restored(big_transfer, goldens, tmp_path, name):
    source = big_transfer if name == "big_transfer" else goldens / name
    arrays = read_arrays(source)
    head = next(key for key in arrays if "head" in key and key.endswith("kernel"))
    bias = head.replace("kernel", "bias")
    untrained = {head: np.zeros_like(arrays[head]), bias: np.full_like(arrays[bias], -10)}
    np.savez(tmp_path / "in.npz", **arrays | untrained)
    model, _ = convert(tmp_path / "in.npz")
    assert type(model) is HfBiTModel
    export(model, tmp_path / "back.npz", "jax")
    assert_same_file(tmp_path / "back.npz", tmp_path / "in.npz")


@pytest.mark.parametrize(
    ("name", "size", "preset"),
    [
        ("BiT-S-R152x4.npz", 224, "bit"),
        ("BiT-M-R50x1-ILSVRC2012.npz", 480, "bit"),
        ("BiT-M-R50x1-run1-caltech101.npz", 480, "bit"),
        ("BiT-M-R50x1-run0-dsprites-xpos.npz", 128, "bit"),
        ("R50x1_160.npz", 160, "big_vision"),
        ("R152x2_T_384.npz", 384, "big_vision"),
    ],
)
def test_the_size_of_a_released_file_is_in_its_name(big_transfer, name, size, preset):
    model, processor = convert(big_transfer.rename(big_transfer.with_name(name)))
    assert (model.config.image_size, processor.preset) == (size, preset)
    pixel_values = processor(np.zeros((50, 70, 3), np.uint8)).pixel_values[0]
    assert pixel_values.shape == (3, size, size)


def test_models_that_a_dialect_does_not_support(goldens, tmp_path):
    model, _ = convert(goldens / "bit_v2.npz")
    with pytest.raises(ConversionError, match="big_transfer"):
        export(model, tmp_path / "out.npz", "jax", dialect="big_transfer")
    with pytest.raises(ConversionError, match="vit_jax"):
        export(model, tmp_path / "out.npz", "jax", dialect="vit_jax")
    model.config.weight_standardization_eps = 1e-8
    with pytest.raises(ConversionError, match="big_transfer"):
        export(model, tmp_path / "out.npz", "jax")
    assert not list(tmp_path.iterdir())


THEIRS = {
    "preactivation": {},
    "preactivation, SAME": SAME_PADDING,
    "bottleneck": {"layer_type": "bottleneck", **SAME_PADDING},
}


@pytest.mark.parametrize("changes", THEIRS.values(), ids=THEIRS)
def test_the_bit_of_transformers(tmp_path, changes):
    """Equal to rounding with its own epsilons; to 2e-6 of the logits with big_transfer's 1e-10 instead of 1e-8."""
    theirs = their_bit(**changes)
    theirs.save_pretrained(tmp_path)
    model, _ = convert(tmp_path)
    assert type(model) is HfBiTForImageClassification
    expected = logits(theirs.double(), PIXELS_64)
    scale = expected.abs().max()
    assert (logits(model.double(), PIXELS_64) - expected).abs().max() <= 1e-12 * scale
    other, _ = convert(tmp_path, weight_standardization_eps=1e-10)
    assert 1e-9 * scale < (logits(other.double(), PIXELS_64) - expected).abs().max() < 2e-6 * scale


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"global_padding": "VALID"}, "global_padding"),
        ({"layer_type": "bottleneck"}, "global_padding"),
        ({"output_stride": 8}, "output_stride"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"width_factor": 2}, "width_factor"),
    ],
)
def test_bits_of_transformers_that_we_do_not_support(tmp_path, changes, message):
    their_bit().save_pretrained(tmp_path)
    change_json(tmp_path / "config.json", **changes)
    with pytest.raises(ConversionError, match=message):
        convert(tmp_path)


@pytest.mark.parametrize("changes", THEIRS.values(), ids=THEIRS)
@pytest.mark.parametrize("has_head", [True, False])
def test_export_to_transformers(tmp_path, changes, has_head):
    theirs = their_bit(transformers.BitForImageClassification if has_head else transformers.BitModel, **changes)
    theirs.save_pretrained(tmp_path / "theirs")
    model, processor = convert(tmp_path / "theirs")
    export(model, tmp_path / "back", "transformers", processor=processor)
    back = transformers.AutoModelForImageClassification if has_head else transformers.AutoModel
    assert_same_weights(back.from_pretrained(tmp_path / "back"), theirs)


def test_bits_that_transformers_and_timm_do_not_support(tmp_path):
    model = tiny_bit(weight_standardization_eps=1e-10)
    with pytest.raises(ConversionError, match="weight_standardization_eps"):
        export(model, tmp_path / "out", "transformers")
    with pytest.raises(ConversionError, match="32"):
        export(model, tmp_path / "out", "timm")


def test_a_folder_for_timm_and_back(tmp_path):
    """R50x1, since timm has no smaller BiT."""
    names = {0: "cat", 1: "dog", 2: "fox"}
    config = HfBiTConfig.from_variant("R50x1", weight_standardization_eps=1e-8, image_size=(96, 64), id2label=names)
    model = randomize(HfBiTForImageClassification(config), mean=0.1)
    assert export(model, tmp_path / "timm", "timm") == {"in_chans": 3, "num_classes": 3}
    config = json.loads((tmp_path / "timm" / "config.json").read_text())
    assert (config["architecture"], config["num_features"]) == ("resnetv2_50x1_bit", 2048)
    again, processor = convert(tmp_path / "timm")
    assert again.config.id2label == {0: "cat", 1: "dog", 2: "fox"}
    assert again.config.image_size == (96, 64)
    assert (processor.preset, processor.resample, processor.crop_size) == ("timm", 2, {"height": 96, "width": 64})
    assert_same_weights(again, model)


def test_the_command_converts_and_exports(big_transfer, tmp_path, run_command):
    assert "HfBiTForImageClassification, " in run_command(["convert", big_transfer, tmp_path / "folder"])
    command = ["export", str(tmp_path / "folder"), str(tmp_path / "back.npz"), "--to", "jax"]
    assert main([*command, "--dialect", "big_transfer"]) == 0
    assert_same_file(tmp_path / "back.npz", big_transfer)


def test_programs(tmp_path):
    from hf_vit.conversion import export

    model = tiny_bit()
    export(model, tmp_path / "program.pt2", "torch-export", size="dynamic")
    program = torch.export.load(tmp_path / "program.pt2").module()
    for height, width in ((43, 64), (90, 51)):
        pixel_values = torch.randn(3, 3, height, width)
        torch.testing.assert_close(program(pixel_values), logits(model, pixel_values))
    with pytest.raises(ConversionError, match="'SAME'"):
        export(tiny_bit(padding="same"), tmp_path / "other.pt2", "torch-export", size="dynamic")
