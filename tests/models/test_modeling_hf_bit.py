"""BiT ResNets: outputs compared with the goldens and a NumPy forward, loading, gradients and initialization."""

from functools import partial

import numpy as np
import pytest
import torch
from transformers import AutoBackbone, AutoModel, AutoModelForImageClassification

from hf_vit import HfBiTBackbone, HfBiTConfig, HfBiTForImageClassification, HfBiTModel
from hf_vit.conversion import convert
from hf_vit.models.configuration_hf_bit import ORIGINALS, VARIANTS

from ..comparing import change_json, logits, read_arrays
from ..paths import golden_runs
from ..references import BIT_PARAMETERS, resnet
from ..tiny_models import BIT_PIXELS, TINY_BIT, tiny_bit

RUNS = {run["id"]: run for run in golden_runs("bit", "bit_paper")}


@pytest.mark.parametrize("name", VARIANTS)
def test_parameter_counts(name):
    config = HfBiTConfig.from_variant(name, num_labels=1000)
    with torch.device("meta"):
        assert HfBiTForImageClassification(config).num_parameters() == BIT_PARAMETERS[name]


def test_variants_and_originals_are_selected_by_name():
    config = HfBiTConfig.from_variant("R50x3", "bit", image_size=480)
    assert (config.layer_type, config.embedding_size, config.padding) == ("bottleneck", 192, "same")
    assert (config.image_size, config.hidden_size, config.stride) == (480, 6144, 32)
    with pytest.raises(ValueError, match="'R18x1'"):
        HfBiTConfig.from_variant("R18x1")
    with pytest.raises(ValueError, match="big_transfer"):
        HfBiTConfig.from_variant("R50x1", "timm")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"embedding_size": 48}, "embedding_size"),
        ({"depths": []}, "depths"),
        ({"patch_size": 16}, "patch_size"),
        ({"layer_type": "basic"}, "layer_type"),
        ({"spatial_mixing": "axial_attention"}, "'bottleneck'"),
    ],
)
def test_impossible_architectures_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        HfBiTConfig(**fields)


def capture(model, unit_name: str) -> dict[str, torch.Tensor]:
    """Return a dictionary that will hold every stage of the goldens, channels last, after a forward."""
    captured: dict[str, torch.Tensor] = {}

    def keep(name, feature_map):
        captured[name] = feature_map.permute(0, 2, 3, 1)

    stages = model.bit.resnet.stages
    stages.register_forward_pre_hook(lambda module, inputs: keep("stem", inputs[0]))
    for s, stage in enumerate(stages, 1):
        for u, unit in enumerate(stage.layers, 1):
            unit.register_forward_hook(partial(lambda name, *args: keep(name, args[-1]), unit_name.format(s, u)))
    return captured


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float64, 1e-9)])
@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_every_stage_equals_the_goldens(run, goldens, dtype, tolerance):
    model, _ = convert(goldens / run["checkpoint"])
    model.to(dtype)
    stages = capture(model, "block{}/unit{}" if run["family"] == "bit" else "block{}/unit{:02d}")
    with np.load(goldens / run["expected"]) as expected, torch.no_grad():
        pixel_values = torch.from_numpy(expected["images"]).to(dtype).permute(0, 3, 1, 2)
        outputs = model.bit(pixel_values)
        stages |= {
            "pre_logits_2d": outputs.last_hidden_state.permute(0, 2, 3, 1),
            "pre_logits": outputs.pooler_output,
            "logits": model(pixel_values).logits,
        }
        gaps = {}
        for name in expected.files:
            if name.endswith("_f64") == (dtype == torch.float64) and name != "images":
                scale = max(1.0, np.abs(expected[name]).max())
                gaps[name] = np.abs(stages[name.removesuffix("_f64")].numpy() - expected[name]).max() / scale
        assert len(gaps) >= 2
        assert max(gaps.values()) <= tolerance, gaps


@pytest.mark.parametrize(("height", "width"), [(43, 64), (34, 49)])
@pytest.mark.parametrize("padding", ["fixed", "same"])
@pytest.mark.parametrize("original", ORIGINALS)
def test_forward_equals_an_independent_one_in_float64(goldens, original, padding, height, width):
    """Every original at even and odd sizes, with the weights of the goldens; their outputs differ."""
    numbers = {**ORIGINALS[original], "padding": padding}
    checkpoint = goldens / ("bit_v1.npz" if original == "bit" else "bit_v2.npz")
    model, _ = convert(checkpoint, **numbers)
    images = np.random.default_rng(4).normal(size=(2, height, width, 3))
    arrays = read_arrays(checkpoint)
    theirs = np.stack([resnet(arrays, image, [1, 2], numbers) for image in images])
    ours = logits(model.double(), torch.from_numpy(images).permute(0, 3, 1, 2)).numpy()
    for name, other in ORIGINALS.items():
        if name != original and (original == "bit") == (name == "bit"):
            assert np.abs(ours - resnet(arrays, images[0], [1, 2], {**numbers, **other})).max() > 1e-4
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-12)


def test_feature_maps_of_a_backbone(tmp_path):
    model = tiny_bit()
    model.save_pretrained(tmp_path)
    backbone = HfBiTBackbone.from_pretrained(tmp_path, out_features=["stem", "stage2"]).eval()
    assert isinstance(AutoBackbone.from_config(backbone.config), HfBiTBackbone)
    assert backbone.channels == [32, 256]
    with torch.no_grad():
        maps = backbone(BIT_PIXELS).feature_maps
        stem, _, stage2 = model(BIT_PIXELS, output_hidden_states=True).hidden_states
    torch.testing.assert_close(maps, (stem, stage2), rtol=0, atol=0)


@pytest.mark.parametrize("layer_type", ["preactivation", "bottleneck"])
def test_a_folder_loads_by_the_auto_classes(tmp_path, layer_type):
    model = tiny_bit(layer_type=layer_type)
    model.save_pretrained(tmp_path)
    again = AutoModelForImageClassification.from_pretrained(tmp_path)
    bare = AutoModel.from_pretrained(tmp_path, image_size=(65, 70))
    assert (type(again), type(bare)) == (HfBiTForImageClassification, HfBiTModel)
    assert tuple(bare.config.image_size) == (65, 70)
    with torch.no_grad():
        assert torch.equal(again(BIT_PIXELS).logits, model(BIT_PIXELS).logits)
        assert torch.equal(bare(BIT_PIXELS).pooler_output, model.bit(BIT_PIXELS).pooler_output)


def test_another_number_of_labels_gives_a_zero_head_and_other_mismatches_are_refused(tmp_path):
    tiny_bit().save_pretrained(tmp_path)
    model = HfBiTForImageClassification.from_pretrained(tmp_path, num_labels=5)
    assert not model.classifier.weight.any()
    for wrong in ({"patch_size": 8}, {"image_size": 64.0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            HfBiTForImageClassification.from_pretrained(tmp_path, **wrong)
    change_json(tmp_path / "config.json", depths=[1, 3])
    with pytest.raises(ValueError, match=r"bit.resnet.stages.1.layers.2.conv1.weight"):
        HfBiTForImageClassification.from_pretrained(tmp_path)


def test_initialization_equals_the_original():
    """flax's defaults: kernels with variance 1 / fan-in, zero head, zero last norm of a post-activation unit."""
    torch.manual_seed(0)
    model = HfBiTForImageClassification(HfBiTConfig(**TINY_BIT, layer_type="bottleneck"))
    unit = model.bit.resnet.stages[1].layers[1]
    assert unit.conv2.weight.std().item() == pytest.approx((9 * 64) ** -0.5, rel=0.05)
    assert not unit.norm3.weight.any()
    assert unit.norm2.weight.eq(1).all()
    assert not model.classifier.weight.any()
