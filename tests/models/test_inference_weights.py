"""Changes of weights after `optimize_for_inference`, compared with an equal model that is not optimised."""

import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.nn.utils import parametrize, prune
from torch.utils.dlpack import to_dlpack  # pyright: ignore[reportPrivateImportUsage] - it is documented
from transformers import AutoModelForImageClassification

from hf_vit.models import inference
from hf_vit.models.inference import GuardedWeight

from ..tiny_models import images, tiny


@pytest.fixture(autouse=True)
def everything_wins(monkeypatch):
    monkeypatch.setattr(inference, "gains_from_packing", lambda weight: True)


def targets(model) -> list:
    """Return modules of each kind whose forward is replaced."""
    convolution = next(module for module in model.modules() if isinstance(module, inference.StandardizedConv2d))
    return [model.vit.layers[1].mlp.fc1, model.vit.layers[0].attention.q_proj, convolution]


def weights(model) -> list[nn.Parameter]:
    return [module.weight for module in targets(model)]


def factor(weight: torch.Tensor) -> torch.Tensor:
    """Return a different factor for each element; an equal one would not change a standardised convolution."""
    return torch.linspace(0.2, 3, weight.numel(), dtype=weight.dtype).reshape(weight.shape)


def for_each(act: Callable) -> Callable:
    """Return a change of each weight by the function that `act` returns for it."""

    def way(model):
        changes = [act(weight) for weight in weights(model)]
        return lambda: [change() for change in changes]

    return way


def at_once(act: Callable) -> Callable:
    """Return a change that keeps no reference before the call."""
    return lambda model: lambda: act(model)


def through(view_of: Callable) -> Callable:
    """Return a change that multiplies, in place, a view of the weight by `view_of`, and keeps the view."""

    def act(weight):
        view = view_of(weight)
        return lambda: view.mul_(factor(view))

    return for_each(act)


def optimizer(kind: Callable, **options) -> Callable:
    def way(model):
        stepper = kind(model.parameters(), lr=0.1, **options)

        def change():
            for parameter in model.parameters():
                parameter.grad = parameter.detach().cos()
            stepper.step()
            stepper.zero_grad()

        return change

    return way


def through_numpy(weight):
    array = weight.detach().numpy()
    return lambda: array.__imul__(factor(weight).numpy())


def through_storage(weight):
    storage = weight.untyped_storage()
    return lambda: storage.copy_((weight.detach() * factor(weight)).untyped_storage())


def through_capsule(weight):
    tensor = torch.from_dlpack(to_dlpack(weight))
    return lambda: tensor.mul_(factor(tensor))


def load(model, **options):
    changed = {name: tensor * factor(tensor) for name, tensor in model.state_dict().items()}
    model.load_state_dict(changed, **options)


def from_vector(model):
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(vector * factor(vector), model.parameters())


def swap(weight):
    torch.utils.swap_tensors(weight, nn.Parameter(weight.detach() * factor(weight)))


def replace(model):
    for module in targets(model):
        module.weight = nn.Parameter(module.weight.detach() * factor(module.weight))


def replace_module(model):
    model.vit.layers[1].mlp.fc1 = nn.Linear(14, 22)


def train_a_layer(model):
    layer = model.vit.layers[1].train()
    stepper = torch.optim.SGD(layer.parameters(), lr=0.3)
    with torch.enable_grad():
        model(images(model)).logits.square().sum().backward()
    stepper.step()
    layer.eval()


class _Scaled(nn.Module):
    def forward(self, weight):
        return weight * factor(weight)


def add_parametrization(model):
    for module in targets(model):
        parametrize.register_parametrization(module, "weight", _Scaled())


def merge_adapters(model):
    peft = pytest.importorskip("peft")
    torch.manual_seed(5)
    config = peft.LoraConfig(target_modules=["fc1", "q_proj"], init_lora_weights=False, r=2)
    peft.get_peft_model(model, config).merge_and_unload()


def compiled(model):
    def change(*tensors):
        for tensor in tensors:
            tensor.mul_(factor(tensor))

    torch.compiler.reset()
    torch.compile(change, backend=aot_autograd(fw_compiler=lambda graph, _: graph))(*weights(model))


def in_shared_memory(model):
    model.share_memory()
    for weight in weights(model):
        weight.data.mul_(factor(weight))


def in_a_thread(model):
    thread = threading.Thread(target=lambda: [weight.data.mul_(factor(weight)) for weight in weights(model)])
    thread.start()
    thread.join()


def multiply_together(model):
    multiply: Any = getattr(torch, "_foreach_mul_")  # noqa: B009 - not exported
    multiply(weights(model), [factor(weight) for weight in weights(model)])


def set_index(weight):
    weight[1:] = torch.rand_like(weight[1:])


WAYS = {
    "SGD": optimizer(torch.optim.SGD),
    "SGD foreach": optimizer(torch.optim.SGD, foreach=True),
    "SGD fused": optimizer(torch.optim.SGD, fused=True),
    "AdamW foreach": optimizer(torch.optim.AdamW, foreach=True),
    "AdamW fused": optimizer(torch.optim.AdamW, fused=True),
    "in place": through(lambda weight: weight),
    ".data": for_each(lambda weight: lambda: weight.data.mul_(factor(weight))),
    ".data =": for_each(lambda weight: lambda: setattr(weight, "data", weight.detach() * factor(weight))),
    "set_": for_each(lambda weight: lambda: weight.set_(weight.detach() * factor(weight))),
    "held .data": through(lambda weight: weight.data),
    "held detach()": through(lambda weight: weight.detach()),
    "held view": through(lambda weight: weight[1:]),
    "held numpy()": for_each(through_numpy),
    "held storage": for_each(through_storage),
    "held DLPack": for_each(through_capsule),
    "index": for_each(lambda weight: lambda: set_index(weight)),
    "out=": for_each(lambda weight: lambda: torch.mul(weight, factor(weight), out=weight)),
    "aten": for_each(lambda weight: lambda: torch.ops.aten.mul_.Tensor(weight, factor(weight))),
    "foreach": at_once(multiply_together),
    "nn.init": for_each(lambda weight: lambda: nn.init.uniform_(weight)),
    "load_state_dict": at_once(load),
    "load_state_dict assign": at_once(functools.partial(load, assign=True)),
    "vector_to_parameters": at_once(from_vector),
    "swap_tensors": for_each(lambda weight: lambda: swap(weight)),
    "another Parameter": at_once(replace),
    "another module": at_once(replace_module),
    "a layer trained": at_once(train_a_layer),
    "parametrization": at_once(add_parametrization),
    "prune": at_once(lambda model: [prune.l1_unstructured(module, "weight", 0.5) for module in targets(model)]),
    "LoRA merged": at_once(merge_adapters),
    "compiled": at_once(compiled),
    "share_memory": at_once(in_shared_memory),
    "thread": at_once(in_a_thread),
}


_SLOW = ("compiled", "LoRA merged")
_PARAMETERS = [pytest.param(way, id=name, marks=[pytest.mark.slow] * (name in _SLOW)) for name, way in WAYS.items()]


@torch.inference_mode()
def logits_of(model, pixel_values):
    return model(pixel_values).logits


def guarded(model) -> list[bool]:
    return [type(weight) is GuardedWeight for weight in weights(model)]


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft 0.21 asks for it
@pytest.mark.parametrize("made", ["before", "after"])
@pytest.mark.parametrize("way", _PARAMETERS)
def test_a_changed_weight_is_used(way, made):
    """Optimisers, views and arrays are created before or after the weights are packed."""
    model, twin = tiny(hybrid=True), tiny(hybrid=True)
    pixel_values, change_twin = images(model), way(twin)
    change = way(model) if made == "before" else None
    logits = logits_of(model.optimize_for_inference(), pixel_values)
    assert change or all(guarded(model))
    change = change or way(model)
    for seed in (4, 5):
        for act in (change, change_twin):
            torch.manual_seed(seed)
            act()
        ours, expected = logits_of(model, pixel_values), logits_of(twin, pixel_values)
        assert (expected - logits).abs().max() > 0.1
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(logits_of(model, pixel_values), expected, rtol=1e-5, atol=1e-4)
        logits = expected


@torch.no_grad()
def test_weights_are_packed_only_without_other_references(tmp_path):
    tiny(hybrid=True).save_pretrained(tmp_path)
    model = AutoModelForImageClassification.from_pretrained(tmp_path)  # its weights lie in a mapped file
    pixel_values, weight = images(model), weights(model)[0]
    model.optimize_for_inference()(pixel_values)
    assert all(guarded(model))
    for holder in (weight.untyped_storage(), model.state_dict(), to_dlpack(weight)):
        model(pixel_values)
        assert not guarded(model)[0], holder
    del holder
    model(pixel_values)
    assert all(guarded(model))
    assert (weight.dtype, weight.shape) == (torch.float32, (22, 14))
    assert all(guarded(model))
    weight.numpy()  # from now on, PyTorch does not count who holds the memory
    model(pixel_values)
    assert guarded(model) == [False, True, True]
    model.optimize_for_inference()(pixel_values)
    assert all(guarded(model))


@pytest.mark.slow
@torch.no_grad()
def test_models_with_packed_weights_work_with_torch_transforms():
    model: Any = tiny()
    twin: Any = tiny()
    pixel_values = images(model)
    expected = twin(pixel_values).logits
    model.optimize_for_inference()(pixel_values)
    weight = model.vit.layers[1].mlp.fc1.weight
    assert type(weight) is GuardedWeight
    assert type(type(weight)(torch.ones(2))) is nn.Parameter
    assert repr(weight) == repr(twin.vit.layers[1].mlp.fc1.weight)
    half = {name: parameter * factor(parameter) for name, parameter in twin.named_parameters()}
    model(pixel_values)
    ours, theirs = (torch.func.functional_call(one, half, (pixel_values,)).logits for one in (model, twin))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-4)
    for around in (
        lambda: torch.export.export(model, (pixel_values,)).module(),
        lambda: torch.compile(model, fullgraph=True, backend=aot_autograd(fw_compiler=lambda graph, _: graph)),
    ):
        model(pixel_values)
        assert type(weight) is GuardedWeight
        output = around()(pixel_values)
        torch.testing.assert_close(getattr(output, "logits", output), expected, rtol=1e-5, atol=1e-4)
