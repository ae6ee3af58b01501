"""Products of linear layers by oneDNN in training, compared with float64; other cases compared with torch."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

from hf_vit.models import inference
from hf_vit.models.inference import TrainedLinear

from ..tiny_models import images, tiny

SIZES = {"hidden_size": 196, "intermediate_size": 210, "num_hidden_layers": 1, "pooling": "mean"}
EXACT = {"rtol": 0, "atol": 0}


@pytest.fixture(autouse=True)
def onednn_wins(monkeypatch):
    monkeypatch.setattr(inference, "onednn_beats_mkl", lambda: True)


@pytest.fixture
def model():
    """A model in training mode; each product of its encoder has 4 x 25 rows."""
    return tiny(**SIZES).train()


def pixel_values(model):
    return images(model).repeat(2, 1, 1, 1)[:4]


def trained(model) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(vars(module).get("forward"), TrainedLinear)]


def counted(monkeypatch) -> list:
    """Return a list of the later products by oneDNN."""
    calls: list = []
    multiply = inference._multiply
    monkeypatch.setattr(inference, "_multiply", lambda *arguments: calls.append(1) or multiply(*arguments))
    return calls


@pytest.mark.parametrize(
    ("cpu", "capability", "mkl", "onednn", "expected"),
    [
        (("AuthenticAMD", 26, 2), "AVX512", "", "", True),
        (("AuthenticAMD", 26, 0x44), "AVX512", "", "", True),
        (("AuthenticAMD", 26, 0x24), "AVX512", "", "", False),  # for laptops: half a vector at a time
        (("AuthenticAMD", 25, 0x11), "AVX512", "", "", False),
        (("AuthenticAMD", 26, 2), "AVX512", "", "AVX2", False),
        (("AuthenticAMD", 25, 1), "AVX2", "", "", False),
        (("GenuineIntel", 6, 207), "AVX512", "", "", False),
        (("GenuineIntel", 6, 207), "AVX512", "AVX2", "", True),
        (("GenuineIntel", 6, 207), "AVX512", "avx512", "", False),
        (("", 0, 0), "AVX512", "", "", False),
    ],
)
def test_cpus_that_use_onednn_products_in_training(monkeypatch, cpu, capability, mkl, onednn, expected):
    monkeypatch.undo()
    monkeypatch.setattr(inference, "has_onednn", lambda: True)
    monkeypatch.setattr(inference, "_cpu", lambda: cpu)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setenv("MKL_ENABLE_INSTRUCTIONS", mkl)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", onednn)
    assert inference.onednn_beats_mkl() is (expected and torch.backends.mkl.is_available())


@pytest.mark.parametrize(
    ("cpuinfo", "processor", "expected"),
    [
        ("processor\t: 0\nvendor_id\t: AuthenticAMD\ncpu family\t: 26\nmodel\t\t: 17\nmodel name\t: AMD", "", 17),
        (None, "AMD64 Family 26 Model 68 Stepping 0, AuthenticAMD", 68),
        (None, "arm", None),
    ],
)
def test_detection_of_the_cpu(monkeypatch, tmp_path, cpuinfo, processor, expected):
    path = tmp_path / "cpuinfo"
    if cpuinfo is not None:
        path.write_text(cpuinfo)
    monkeypatch.setattr(inference, "open", lambda name, **options: path.open(**options), raising=False)
    monkeypatch.setattr(inference.platform, "processor", lambda: processor)
    assert inference._cpu.__wrapped__() == (("", 0, 0) if expected is None else ("AuthenticAMD", 26, expected))


@pytest.mark.parametrize("inputs", [193, 1024])
@pytest.mark.parametrize("outputs", [201, 1024])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("frozen", ["", "tokens", "weight", "bias"])
def test_gradients_are_as_close_to_float64_as_torchs(monkeypatch, inputs, outputs, bias, frozen):
    torch.manual_seed(3)
    layer = nn.Linear(inputs, outputs, bias=bias)
    tokens, direction = torch.randn(2, 37, inputs), torch.randn(2, 37, outputs)
    calls = counted(monkeypatch)

    def results(dtype, through_onednn=False):
        own = copy.deepcopy(layer).to(dtype)
        wanted = {"tokens": tokens.to(dtype, copy=True), "weight": own.weight, "bias": own.bias}
        given = {name: tensor.requires_grad_(name != frozen) for name, tensor in wanted.items() if tensor is not None}
        output = TrainedLinear(own)(given["tokens"]) if through_onednn else own(given["tokens"])
        output.backward(direction.to(dtype))
        return [output, *(tensor.grad for tensor in given.values())]

    exact, torchs = results(torch.float64), results(torch.float32)
    assert not calls
    for mine, right, theirs in zip(results(torch.float32, through_onednn=True), exact, torchs, strict=True):
        assert (mine is None) == (right is None)
        if mine is not None:
            error, usual = ((found - right).norm() / right.norm() for found in (mine, theirs))
            assert error <= max(3 * usual, 1e-6)
            assert mine.is_contiguous()
    assert calls


def test_onednn_products_are_used_in_training_mode_only(model, monkeypatch):
    assert len(trained(model)) == 6
    assert type(model.vit.layers[0].attention.q_proj) is nn.Linear
    calls = counted(monkeypatch)
    model(pixel_values(model)).logits.square().sum().backward()
    assert len(calls) == 12
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert all(module.__dict__["forward"].module is module for module in map(other.get_submodule, trained(other)))
        assert trained(other) == trained(model)
    assert trained(model.eval()) == []
    assert trained(model.train().optimize_for_inference()) == []


@pytest.fixture
def one_process():
    """Process group of one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_onednn_products_work_with_fsdp(model, monkeypatch, one_process):
    """FSDP2 gathers each layer for its forward and its backward; the model without FSDP2 is the reference."""

    def gradients(model):
        before = len(calls)
        model(pixel_values(model)).logits.square().sum().backward()
        assert len(calls) == before + 12
        return [getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for p in model.parameters()]

    calls = counted(monkeypatch)
    sharded, expected = copy.deepcopy(model), gradients(model)
    mesh = init_device_mesh("cpu", (1,))
    for part in (sharded.vit.layers[0], sharded):
        fully_shard(part, mesh=mesh, reshard_after_forward=True)
    torch.testing.assert_close(gradients(sharded), expected, **EXACT)
    sharded.zero_grad()
    assert trained(sharded.eval()) == []
    torch.testing.assert_close(gradients(sharded.train()), expected, **EXACT)


def test_checkpointed_gradients_are_the_same(model):
    def gradients():
        model.zero_grad()
        model(pixel_values(model)).logits.square().sum().backward()
        return [parameter.grad for parameter in model.parameters()]

    expected = gradients()
    model.activation_checkpointing_enable()
    torch.testing.assert_close(gradients(), expected, **EXACT)


def under_autocast(model, pixels):
    with torch.autocast("cpu", torch.bfloat16):
        return model(pixels).logits


def by_func(model, pixels):
    parameters = dict(model.named_parameters())
    return torch.func.grad(lambda p: functional_call(model, p, (pixels,)).logits.square().sum())(parameters)


def forward_mode(model, pixels):
    layer, tokens = model.vit.layers[0].mlp, torch.linspace(-1, 1, 100 * 196).view(100, 196)
    return torch.func.jvp(layer, (tokens,), (tokens.flip(0),))[1]


def flops(model, pixels):
    with FlopCounterMode(display=False) as counter:
        model(pixels).logits.sum().backward()
    return counter.get_total_flops()


def in_bfloat16(model, pixels):
    return copy.deepcopy(model).to(torch.bfloat16)(pixels.to(torch.bfloat16)).logits


def without_gradients(model, pixels):
    with torch.no_grad():
        return model(pixels).logits


def of_few_rows(model, pixels):
    return model(pixels[:1]).logits


def compiled(model, pixels):
    torch.compiler.reset()
    graph = torch.compile(model.vit.layers[0].mlp, fullgraph=True, backend=aot_autograd(fw_compiler=lambda g, _: g))
    return graph(torch.linspace(-1, 1, 100 * 196).view(100, 196))


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is:DeprecationWarning")  # torch's, of forward mode
@pytest.mark.parametrize(
    "work",
    [under_autocast, by_func, forward_mode, flops, in_bfloat16, without_gradients, of_few_rows, compiled],
    ids=lambda work: work.__name__,
)
def test_other_cases_use_torchs_products(model, monkeypatch, work):
    calls = counted(monkeypatch)
    found = work(model, pixel_values(model))
    assert not calls
    expected = work(model.eval(), pixel_values(model))
    torch.testing.assert_close(found, expected, **EXACT)


def test_second_derivatives(monkeypatch):
    """Second derivatives of a product and a square, compared with float64."""
    torch.manual_seed(4)
    layer = nn.Linear(192, 193)
    layer.forward = TrainedLinear(layer)
    tokens = torch.randn(70, 192)

    def second(layer, tokens):
        tokens = tokens.clone().requires_grad_()
        parameters = [tokens, *layer.parameters()]
        firsts = torch.autograd.grad(layer(tokens).pow(3).mean(), parameters, create_graph=True)
        return torch.autograd.grad(sum(first.square().sum() for first in firsts), parameters)

    calls = counted(monkeypatch)
    found = second(layer, tokens)
    assert calls
    plain = nn.Linear(192, 193).double()
    plain.load_state_dict(layer.state_dict())
    expected = second(plain, tokens.double())
    torch.testing.assert_close(found, [e.float() for e in expected], rtol=1e-4, atol=1e-6)
