"""`optimize_for_inference`: outputs equal to rounding, and no effect on other features."""

import copy
import pickle
import platform
import time

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd

from hf_vit import HfBiTConfig, HfBiTForImageClassification
from hf_vit.models import inference, layers
from hf_vit.models.configuration_hf_bit import ORIGINALS
from hf_vit.models.inference import PackedLinear, PackedMLP, StandardizedOnce

from ..tiny_models import VARIANTS, images, tiny

EXACT = {"rtol": 0, "atol": 0}


@pytest.fixture(autouse=True)
def everything_wins(monkeypatch):
    """Pack all layers, on any CPU and of any size."""
    monkeypatch.setattr(layers, "mkl_is_narrower", lambda: True)
    monkeypatch.setattr(inference, "gains_from_packing", lambda weight: True)


@pytest.fixture(params=VARIANTS.values(), ids=VARIANTS)
def model(request):
    return tiny(**request.param)


def replaced(model) -> list[str]:
    return [type(module.__dict__["forward"]).__name__ for module in model.modules() if "forward" in module.__dict__]


def test_torch_has_the_internal_onednn_operators():
    """They are internal to torch; this test fails with a version that lacks them."""
    assert inference.has_onednn()


@pytest.mark.parametrize(
    ("machine", "capability", "limit", "dtype", "narrow", "wide"),
    [
        ("x86_64", "AVX512", "", torch.float32, True, True),
        ("AMD64", "AVX512", "AVX512_CORE", torch.bfloat16, True, True),
        ("x86_64", "AVX512", "avx2", torch.float32, False, True),
        ("x86_64", "AVX2", "", torch.float32, False, True),
        ("x86_64", "AVX2", "", torch.bfloat16, False, False),  # packing raises an error there
        ("aarch64", "DEFAULT", "", torch.float32, False, False),
    ],
)
def test_packing_depends_on_cpu_and_shape_not_on_timing(monkeypatch, machine, capability, limit, dtype, narrow, wide):
    """An earlier rule measured times; under load it left layers unpacked at random."""
    monkeypatch.undo()
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
    has_bfloat16 = capability == "AVX512"
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: has_bfloat16)
    for clock in ("time", "perf_counter", "process_time", "thread_time", "monotonic"):
        monkeypatch.setattr(time, clock, None)
    for width, expected in ((192, narrow), (384, wide)):
        layer = nn.Sequential(*(nn.Linear(width, outputs, dtype=dtype) for outputs in (width, 4 * width, 1000)))
        inference.optimize(layer)
        assert [bool(replaced(linear)) for linear in layer] == [expected] * 3


@torch.no_grad()
def test_optimised_outputs_equal_the_plain_ones(model):
    expected = model(images(model), output_hidden_states=True)
    assert model.optimize_for_inference(batch_size=2) is model
    kinds = replaced(model)
    assert kinds.count("PackedMLP") >= 3
    assert kinds.count("PackedLinear") >= 3 * 6 + 1
    assert ("StandardizedOnce" in kinds) == (model.vit.embeddings.stem is not None)
    ours = model(images(model), output_hidden_states=True)
    torch.testing.assert_close(ours.logits, expected.logits, rtol=0, atol=2e-5)
    for hidden_states, theirs in zip(ours.hidden_states, expected.hidden_states, strict=True):
        torch.testing.assert_close(hidden_states, theirs, rtol=1e-5, atol=2e-5)
    attentions = model(images(model), output_attentions=True).attentions
    model.train().eval()
    for ours, theirs in zip(attentions, model(images(model), output_attentions=True).attentions, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=5e-6)


@torch.no_grad()
@pytest.mark.parametrize("original", ["big_transfer", "bit_paper", "bit"])
def test_optimised_resnets_have_equal_outputs(original):
    torch.manual_seed(2)
    config = HfBiTConfig(**ORIGINALS[original], embedding_size=32, depths=[1, 2], num_labels=5)
    model = HfBiTForImageClassification(config).eval()
    nn.init.normal_(model.classifier.weight)
    pixel_values = torch.randn(2, 3, 45, 68)
    expected = model(pixel_values).logits
    assert replaced(model.optimize_for_inference()).count("StandardizedOnce") == 1 + 4 + 3 + 4
    torch.testing.assert_close(model(pixel_values).logits, expected, rtol=1e-5, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("hidden_act", ["gelu", "gelu_pytorch_tanh", "relu"])
def test_optimised_models_support_every_activation(hidden_act):
    model = tiny(hidden_act=hidden_act)
    expected = model(images(model)).logits
    assert ("PackedMLP" in replaced(model.optimize_for_inference())) == (hidden_act != "relu")
    torch.testing.assert_close(model(images(model)).logits, expected, rtol=0, atol=2e-5)


def test_gradients_are_those_of_the_plain_model(model):
    model(images(model)).logits.square().sum().backward()
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    model.optimize_for_inference()(images(model)).logits.square().sum().backward()
    torch.testing.assert_close([parameter.grad for parameter in model.parameters()], expected, **EXACT)


@torch.no_grad()
def test_changed_weights_are_used(model):
    model.optimize_for_inference()
    model(images(model))
    other = tiny(seed=3, hybrid=model.vit.embeddings.stem is not None) if model.config.pooling == "cls" else model
    for parameter in model.parameters():
        parameter.mul_(1.25)
    if other is not model and other.state_dict().keys() == model.state_dict().keys():
        model.load_state_dict(other.state_dict())
    ours = model(images(model)).logits
    assert replaced(model)
    assert not replaced(model.train().eval())
    torch.testing.assert_close(ours, model(images(model)).logits, rtol=1e-5, atol=5e-5)


@torch.no_grad()
def test_optimised_models_can_be_copied_pickled_and_saved(model, tmp_path):
    expected = model(images(model)).logits
    model.optimize_for_inference().optimize_for_inference(batch_size=3)
    model(images(model))
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert replaced(other) == replaced(model)
        for module in other.modules():  # its copies read its own weights, not those of the model it came from
            if isinstance(forward := module.__dict__.get("forward"), PackedLinear | StandardizedOnce):
                assert forward.module is module
        torch.testing.assert_close(other(images(model)).logits, expected, rtol=0, atol=2e-5)
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(type(model).from_pretrained(tmp_path)(images(model)).logits, expected)


@torch.no_grad()
def test_other_dtypes_and_autocast(model):
    model.optimize_for_inference()
    with torch.autocast("cpu", torch.bfloat16):
        ours = model(images(model)).logits
    plain = copy.deepcopy(model).train().eval()
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(ours, plain(images(model)).logits, **EXACT)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.bfloat16, 0.2)):
        ours = model.to(dtype)(images(model)).logits
        expected = plain.to(dtype)(images(model)).logits
        torch.testing.assert_close(ours, expected, rtol=tolerance, atol=tolerance)


@torch.no_grad()
@pytest.mark.parametrize("name", ["fc1", "activation", "dropout"])
@pytest.mark.parametrize("kind", ["register_forward_hook", "register_forward_pre_hook"])
def test_hooks_get_the_same_values_after_optimisation(name, kind):
    model = tiny().optimize_for_inference()
    seen: list[torch.Tensor] = []
    register = getattr(model.vit.layers[1].mlp.get_submodule(name), kind)
    register(lambda module, inputs, output=None: seen.append(inputs[0] if output is None else output))
    model(images(model))
    number = len(seen)
    model.train().eval()(images(model))
    assert number
    torch.testing.assert_close(seen[:number], seen[number:], rtol=0, atol=1e-5)


@pytest.mark.slow
def test_optimised_models_compile_without_graph_breaks(model):
    """Every stage of torch's compiler before code generation; oneDNN still computes the products."""
    model.optimize_for_inference()
    products = []

    def look(graph, example_inputs):
        products.extend(node for node in graph.graph.nodes if node.target is torch.ops.hf_vit.onednn_linear.default)
        return graph

    torch.compiler.reset()
    with torch.inference_mode():
        ours = torch.compile(model, fullgraph=True, backend=aot_autograd(fw_compiler=look))(images(model)).logits
        torch.testing.assert_close(ours, model(images(model)).logits, rtol=0, atol=2e-5)
    assert len(products) >= 3 * 6 + 1
    torch.compiler.reset()


def test_optimised_models_can_be_exported():
    model = tiny().optimize_for_inference()
    pixel_values = images(model)
    program = torch.export.export(model, (pixel_values,))
    assert not any("mkldnn" in str(node.target) or "hf_vit" in str(node.target) for node in program.graph.nodes)
    with torch.no_grad():
        expected = model(pixel_values).logits
    torch.testing.assert_close(program.module()(pixel_values).logits, expected, rtol=0, atol=2e-5)


@torch.no_grad()
def test_without_the_operators_nothing_is_packed(monkeypatch):
    model = tiny(hybrid=True)
    expected = model(images(model)).logits
    monkeypatch.setattr(inference, "OPERATORS", ("_no_such_operator",))
    assert set(replaced(model.optimize_for_inference())) == {"StandardizedOnce"}
    torch.testing.assert_close(model(images(model)).logits, expected, rtol=0, atol=2e-5)


def test_a_forward_replaced_by_other_code_is_kept():
    model = tiny()
    fc1 = model.vit.layers[0].mlp.fc1
    fc1.forward = theirs = lambda tokens: torch.zeros(*tokens.shape[:-1], 22)
    model.optimize_for_inference()
    assert fc1.forward is theirs
    with torch.no_grad():
        model(images(model))
    assert isinstance(model.vit.layers[0].mlp.__dict__["forward"], PackedMLP)
