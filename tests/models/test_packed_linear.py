"""The frozen copy of `optimize_for_inference`: equal outputs, an untouched original, one error for everything else."""

import copy
import pickle
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from transformers import Trainer, TrainingArguments, pipeline

from hf_vit import HfBiTConfig, HfBiTForImageClassification, HfViTConfig, HfViTForMaskedPatchPrediction
from hf_vit.models import packed_linear
from hf_vit.models.configuration_hf_bit import ORIGINALS
from hf_vit.models.packed_linear import FrozenConv2d, FrozenLinear, FrozenModelError

from ..processes import finish, start
from ..tiny_models import TINY, images, randomize, save_tiny, tiny

HAS_BFLOAT16 = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


@pytest.fixture(autouse=True)
def packs(monkeypatch):
    """Pack all layers, on any CPU that has the operators."""
    monkeypatch.setattr(packed_linear, "packing_is_faster", lambda weight: True)


with_and_without_a_stem = pytest.mark.parametrize("hybrid", [False, True])


def packed(model) -> int:
    return sum(isinstance(module, FrozenLinear) and module.is_packed for module in model.modules())


@torch.no_grad()
def test_outputs_equal_those_of_the_original_which_is_unchanged(model):
    expected = model(images(model), output_hidden_states=True)
    before, modules = copy.deepcopy(model.state_dict()), list(model.train().modules())
    frozen = model.optimize_for_inference(batch_size=2)
    assert packed(frozen) >= 3 * 6 + 1
    assert (model.training, frozen.training) == (True, False)
    ours = frozen(images(model), output_hidden_states=True)
    torch.testing.assert_close(ours.logits, expected.logits, rtol=0, atol=2e-5)
    torch.testing.assert_close(ours.hidden_states, expected.hidden_states, rtol=1e-5, atol=2e-5)
    attentions = frozen(images(model), output_attentions=True).attentions
    theirs = model.eval()(images(model), output_attentions=True).attentions
    torch.testing.assert_close(attentions, theirs, rtol=0, atol=5e-6)
    assert torch.equal(model(images(model), output_hidden_states=True).logits, expected.logits)
    assert all(one is other for one, other in zip(modules, model.modules(), strict=True))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@torch.no_grad()
@pytest.mark.parametrize("original", ["big_transfer", "bit_paper", "bit"])
def test_outputs_of_resnets(original):
    torch.manual_seed(2)
    config = HfBiTConfig(**ORIGINALS[original], embedding_size=32, depths=[1, 2], num_labels=5)
    model = HfBiTForImageClassification(config).eval()
    nn.init.normal_(model.classifier.weight)
    pixel_values = torch.randn(2, 3, 45, 68)
    frozen = model.optimize_for_inference()
    assert sum(isinstance(module, FrozenConv2d) for module in frozen.modules()) == 1 + 4 + 3 + 4
    torch.testing.assert_close(frozen(pixel_values).logits, model(pixel_values).logits, rtol=1e-5, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("hidden_act", ["gelu", "gelu_pytorch_tanh", "relu"])
def test_every_activation(hidden_act):
    model = tiny(hidden_act=hidden_act)
    ours = model.optimize_for_inference()(images(model)).logits
    torch.testing.assert_close(ours, model(images(model)).logits, rtol=0, atol=2e-5)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["patch size", "patches", "masked"])
def test_outputs_of_other_inputs(kind):
    model = randomize(HfViTForMaskedPatchPrediction(HfViTConfig(**TINY))) if kind == "masked" else tiny()
    inputs = {
        "patch size": {"pixel_values": images(model), "patch_size": (5, 9)},
        "patches": {"pixel_values": torch.randn(2, 30, 72), "spatial_shapes": torch.tensor([[5, 6], [3, 4]])},
        "masked": {"pixel_values": images(model), "bool_masked_pos": torch.rand(2, 30) > 0.5},
    }[kind]
    if kind == "patch size":
        model.make_flexible()
    expected = model(**inputs).logits
    torch.testing.assert_close(model.optimize_for_inference()(**inputs).logits, expected, rtol=1e-5, atol=5e-5)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes(monkeypatch, dtype):
    if not (dtype == torch.bfloat16 and HAS_BFLOAT16):
        monkeypatch.undo()  # these are never packed
    model = tiny().to(dtype)
    pixel_values, tolerance = images(model).to(dtype), 0.2 if dtype == torch.bfloat16 else 1e-12
    ours = model.optimize_for_inference()(pixel_values).logits
    torch.testing.assert_close(ours, model(pixel_values).logits, rtol=tolerance, atol=tolerance)


@torch.no_grad()
@with_and_without_a_stem
def test_autocast(hybrid):
    model = tiny(hybrid)
    frozen = model.optimize_for_inference()
    with torch.autocast("cpu", torch.bfloat16):
        ours = frozen(images(model)).logits
    torch.testing.assert_close(ours.float(), model(images(model)).logits, rtol=0.2, atol=0.2)


def calls_that_need_the_weights(frozen, folder):
    """Yield calls that must raise FrozenModelError."""
    yield frozen.train
    yield frozen.vit.train
    yield frozen.requires_grad_
    yield lambda: frozen(images(frozen).requires_grad_())
    yield lambda: setattr(frozen.classifier, "weight", nn.Parameter(torch.zeros(11, 14)))
    yield lambda: frozen.vit.layers[0].mlp.fc1.weight.data.zero_()
    yield lambda: frozen.load_state_dict({})
    yield frozen.state_dict
    yield frozen.vit.state_dict
    yield lambda: frozen.save_pretrained(folder)
    yield lambda: frozen.push_to_hub("name")
    yield lambda: frozen.set_image_size((40, 36))
    yield lambda: frozen.set_patch_size((5, 6))
    yield lambda: frozen.set_num_channels(1)
    yield lambda: frozen.vit.make_flexible()
    yield frozen.double
    yield lambda: frozen.to(torch.bfloat16)
    yield lambda: frozen.vit.to("meta")
    yield lambda: copy.deepcopy(frozen)
    yield lambda: pickle.dumps(frozen)
    yield frozen.optimize_for_inference
    yield lambda: torch.jit.trace(frozen, images(frozen), strict=False)
    yield lambda: torch.export.export(frozen, (images(frozen),))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # of torch.jit.trace
@pytest.mark.parametrize("is_packed", [True, False])
def test_everything_but_inference_raises_one_error(monkeypatch, tmp_path, is_packed):
    monkeypatch.setattr(packed_linear, "packing_is_faster", lambda weight: is_packed)
    frozen = tiny().optimize_for_inference()
    before = frozen(images(frozen)).logits
    for call in calls_that_need_the_weights(frozen, tmp_path / "folder"):
        with pytest.raises(FrozenModelError, match="optimize_for_inference"):
            call()
    assert not (tmp_path / "folder").exists()
    assert torch.equal(frozen(images(frozen)).logits, before)  # no call has changed it halfway
    assert not before.requires_grad


@torch.no_grad()
@with_and_without_a_stem
def test_a_frozen_model_stays_as_it_is(hybrid):
    """Moves that change nothing are accepted; later changes of the original are not seen."""
    model = tiny(hybrid)
    frozen = model.optimize_for_inference()
    assert frozen.to("cpu").to(torch.float32).float().eval() is frozen
    assert (frozen.dtype, frozen.device, frozen.config) == (model.dtype, model.device, model.config)
    before = frozen(images(model)).logits
    for parameter in model.parameters():
        parameter.mul_(1.25)
    model.config.num_attention_heads = 1
    assert torch.equal(frozen(images(model)).logits, before)


@torch.no_grad()
@pytest.mark.parametrize("name", ["mlp", "mlp.dropout", "attention", "attention.q_proj", "mlp.fc1"])
@pytest.mark.parametrize("kind", ["register_forward_hook", "register_forward_pre_hook"])
def test_hooks_get_the_values_of_the_original(name, kind):
    """Hooks of a frozen model; the output of a packed `fc1` includes the activation."""
    model = tiny()
    frozen, seen = model.optimize_for_inference(), []
    includes_activation = (name, kind) == ("mlp.fc1", "register_forward_hook")
    for one, module in ((frozen, name), (model, "mlp.activation" if includes_activation else name)):
        layer = one.vit.layers[1].get_submodule(module)
        getattr(layer, kind)(lambda module, inputs, output=None: seen.append(inputs[0] if output is None else output))
        one(images(model))
    ours, expected = seen[: len(seen) // 2], seen[len(seen) // 2 :]
    assert ours
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)


@torch.no_grad()
def test_pipelines_and_trainers_predict_with_a_frozen_model(tmp_path):
    folder = save_tiny(tmp_path / "folder")
    classify = pipeline("image-classification", model=str(folder), image_processor=str(folder), device="cpu")
    model, processor = classify.model, classify.image_processor
    frozen = model.optimize_for_inference()
    pixel_values = processor(torch.randint(256, (3, 25, 40), dtype=torch.uint8), return_tensors="pt").pixel_values
    classify = pipeline("image-classification", model=frozen, image_processor=processor, device="cpu")
    assert classify.model is frozen
    trainer = Trainer(frozen, TrainingArguments(str(tmp_path / "out"), use_cpu=True, report_to="none"))
    found = trainer.predict([{"pixel_values": pixel_values[0], "labels": 3}])  # pyright: ignore[reportArgumentType]
    expected = model(pixel_values).logits
    torch.testing.assert_close(torch.from_numpy(found.predictions), expected, rtol=1e-5, atol=2e-5)


@pytest.mark.slow
def test_frozen_models_compile_without_graph_breaks(model):
    """Every stage of torch's compiler before code generation; the products stay oneDNN's."""
    frozen, products = model.optimize_for_inference(), []

    def look(graph, example_inputs):
        operator = torch.ops.hf_vit.packed_linear.default
        products.extend(node for node in graph.graph.nodes if node.target is operator)
        return graph

    torch.compiler.reset()
    with torch.inference_mode():
        ours = torch.compile(frozen, fullgraph=True, backend=aot_autograd(fw_compiler=look))(images(model)).logits
        torch.testing.assert_close(ours, frozen(images(model)).logits, rtol=0, atol=2e-5)
    assert len(products) >= 3 * 6 + 1
    torch.compiler.reset()


@torch.no_grad()
@pytest.mark.parametrize("missing", ["_linear_pointwise", "_reorder_linear_weight"])
def test_without_an_operator_nothing_is_packed(monkeypatch, missing):
    """torch calls them internal, so any version may lack them."""
    monkeypatch.undo()
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    assert packed_linear.packing_is_faster(torch.zeros(2, 2))
    others = {name: getattr(torch.ops.mkldnn, name) for name in dir(torch.ops.mkldnn) if name != missing}
    monkeypatch.setattr(torch.ops, "mkldnn", SimpleNamespace(**others))
    model = tiny(hybrid=True)
    frozen = model.optimize_for_inference()
    assert packed(frozen) == 0
    torch.testing.assert_close(frozen(images(model)).logits, model(images(model)).logits, rtol=0, atol=2e-5)


MEMORY = """
import ctypes, sys, torch
from hf_vit import HfViTConfig, HfViTForImageClassification
from hf_vit.models import packed_linear

def memory():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))

ctypes.CDLL(None).mallopt(-3, 100_000)  # M_MMAP_THRESHOLD: freed memory is given back at once
packed_linear.packing_is_faster = lambda weight: IS_PACKED
config = HfViTConfig(hidden_size=256, num_attention_heads=2, intermediate_size=4096, num_hidden_layers=1, image_size=32)
with torch.inference_mode():  # modules of torch are imported and small buffers are allocated before it counts
    HfViTForImageClassification(config).optimize_for_inference()(torch.zeros(1, 3, 32, 32))
config.num_hidden_layers = 12
before = memory()
model = HfViTForImageClassification(config).eval()
with torch.inference_mode():
    model(torch.zeros(1, 3, 32, 32))
    plain = memory() - before
    model = model.optimize_for_inference()
    model(torch.zeros(1, 3, 32, 32))
print((memory() - before) / plain)
"""


@pytest.mark.slow  # the only test of models that starts a process
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("is_packed", [True, False], ids=["packed", "plain"])
def test_a_frozen_model_takes_the_memory_of_a_plain_one(is_packed):
    """In a process of its own; 110 MiB of weights."""
    done = finish(start(MEMORY.replace("IS_PACKED", str(is_packed))))
    assert 0.9 < float(done.stdout) < 1.1
