"""Operations of models, compared with formulas and with torch's own counter on real tensors."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from hf_vit import analysis
from hf_vit.models.compute import count_multiply_adds, count_with_padding
from hf_vit.models.configuration_hf_bit import DEPTHS, HfBiTConfig
from hf_vit.models.configuration_hf_bit import VARIANTS as BIT_VARIANTS
from hf_vit.models.configuration_hf_vit import VARIANTS, HfViTConfig, HfViTHybridConfig

from ..comparing import some
from ..processes import finish, start
from ..references import BIT_PARAMETERS, VIT_PARAMETERS
from ..tiny_models import images, tiny


def resnet_multiply_adds(width: int, depths: list[int], pixels: int) -> int:
    """Sum the root and the bottlenecks: 1 x 1, 3 x 3 (with the stride), 1 x 1, and a projection in each first unit."""
    side = -(-pixels // 2)
    total = side**2 * width * 3 * 7 * 7
    side, inputs = -(-side // 2), width
    for stage, depth in enumerate(depths):
        channels = width * 2**stage
        for unit in range(depth):
            output = -(-side // 2) if stage and not unit else side
            total += side**2 * inputs * channels + output**2 * (9 * channels**2 + 4 * channels**2)
            total += 0 if unit else output**2 * inputs * 4 * channels
            side, inputs = output, 4 * channels
    return total


def model_multiply_adds(config: HfViTConfig, pixels: int) -> int:
    hybrid = isinstance(config, HfViTHybridConfig)
    stages = len(config.stem_depths) if hybrid else 0
    map_channels = (config.stem_width * 2 ** (stages + 1) if stages else config.stem_width) if hybrid else 3
    patches, width = (pixels // (config.stride * config.patch_size)) ** 2, config.hidden_size
    tokens = patches + config.num_prefix_tokens
    layer = 4 * tokens * width**2 + 2 * tokens**2 * width + 2 * tokens * width * config.intermediate_size
    total = patches * map_channels * config.patch_size**2 * width + config.num_hidden_layers * layer
    stem = resnet_multiply_adds(config.stem_width, config.stem_depths, pixels) if hybrid else 0
    return total + width * config.num_labels + stem


QUICK = ("Ti/16", "B/32-gap-norep", "R+Ti/16")


@pytest.mark.parametrize("name", some(VARIANTS, *QUICK))
def test_compute_of_variants_equals_the_formula(name):
    config = HfViTConfig.from_variant(name, num_labels=1000)
    assert count_multiply_adds(config) == model_multiply_adds(config, 224)
    if name in ("Ti/16", "R50+B/16"):
        larger = analysis.count_compute(config, 384)
        assert larger.image_size == (384, 384)
        assert larger.multiply_adds == model_multiply_adds(config, 384)


PARTS = ("B/16", "S/32-gap-norep", "R+Ti/16", "R50+L/32")


@pytest.mark.parametrize("name", some(PARTS, "S/32-gap-norep", "R+Ti/16"))
def test_compute_of_each_part_equals_the_formula(name):
    config = HfViTConfig.from_variant(name, num_labels=1000)
    compute = analysis.count_compute(config)
    assert compute.parameters == VIT_PARAMETERS[name]
    parts = {part.name: part for part in compute.parts}
    width, layers = config.hidden_size, config.num_hidden_layers
    tokens = config.grid_size[0] ** 2 + config.num_prefix_tokens
    assert parts["attention: between tokens"] == ("attention: between tokens", 0, layers * 2 * tokens**2 * width)
    assert parts["attention: projections"].multiply_adds == layers * 4 * tokens * width**2
    assert parts["attention: projections"].parameters == layers * 4 * (width**2 + width)
    assert parts["MLP"].multiply_adds == layers * 8 * tokens * width**2
    assert parts["head"] == ("head", 1000 * (width + 1), 1000 * width)
    assert parts["class token and positions"].parameters == (tokens + config.num_prefix_tokens) * width
    assert ("ResNet stem" in parts) == name.startswith("R")
    if name.startswith("R"):
        stem = resnet_multiply_adds(config.stem_width, config.stem_depths, 224)
        assert parts["ResNet stem"].multiply_adds == stem


@pytest.mark.parametrize("name", some(["R50x1", "R101x3"], "R50x1"))
def test_compute_of_a_resnet_equals_the_formula(name):
    layers, factor = BIT_VARIANTS[name]
    compute = analysis.count_compute(HfBiTConfig.from_variant(name, num_labels=1000))
    head = 64 * factor * 2**5 * 1000
    assert compute.multiply_adds == resnet_multiply_adds(64 * factor, DEPTHS[layers], 224) + head
    assert compute.logits_multiply_adds == compute.multiply_adds
    assert compute.parameters == BIT_PARAMETERS[name]
    stages = [f"ResNet stage {number}" for number in (1, 2, 3, 4)]
    assert [part.name for part in compute.parts] == ["ResNet root", *stages, "normalization", "head"]


def test_multiply_adds_equal_torchs_counter(model):
    model.set_attn_implementation("eager")
    compute = analysis.count_compute(model)
    rows, columns = model.config.grid_size
    # the pooling's own attention, which torch's counter does not know on the CPU
    fused = 2 * 2 * model.config.hidden_size * (rows * columns + model.config.num_prefix_tokens)
    missing = fused if model.config.pooling == "map" else 0
    for states, expected in ((True, compute.multiply_adds), (False, compute.logits_multiply_adds)):
        with FlopCounterMode(display=False) as counter:
            model(images(model, batch=1), output_hidden_states=states)
        assert counter.get_total_flops() + missing == 2 * expected
    assert compute.parameters == model.num_parameters()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("fields", [{}, {"hybrid": True}], ids=["plain", "hybrid"])
def test_activation_memory_equals_what_autograd_saves(attention, fields):
    model = tiny(**fields)
    model.set_attn_implementation(attention)
    weights = {weight.data_ptr() for weight in model.parameters()}

    def saved_bytes(batch):
        kept = {}

        def keep(tensor):
            kept[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            model(images(model, batch))
        return sum(tensor.untyped_storage().nbytes() for place, tensor in kept.items() if place not in weights)

    assert analysis.count_compute(model, attention=attention).activation_bytes == saved_bytes(2) - saved_bytes(1) > 0


def inside(size: int, kernel: int, stride: int, before: int) -> int:
    places = [start * stride - before + tap for start in range(size // stride) for tap in range(kernel)]
    return len([place for place in places if 0 <= place < size])


def test_products_with_padding_by_hand():
    """For a 3 x 3 kernel on 5 x 7, the first and the last output lack one row or column each."""
    config = HfBiTConfig(depths=[1], embedding_size=32, image_size=(20, 28))
    root = (10 * 14 * 49 - inside(20, 7, 2, 3) * inside(28, 7, 2, 3)) * 3 * 32
    unit = (5 * 7 * 9 - (3 * 5 - 2) * (3 * 7 - 2)) * 32 * 32
    assert count_with_padding(config)[1] == root + unit
    assert count_with_padding(HfViTConfig.from_variant("Ti/16"))[1] == 0


def test_counting_allocates_no_weights():
    """The weights of H/14 are 2.5 GB; the process grows by less than 300 MB."""
    code = (
        "import resource\nfrom hf_vit.analysis.compute import load_config\n"
        "from hf_vit.models.compute import count_multiply_adds\n"
        "count_multiply_adds(load_config('Ti/16'))\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "count_multiply_adds(load_config('H/14'))\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    assert int(finish(start(code)).stdout) < 300_000  # KiB
