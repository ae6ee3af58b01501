"""Models in other libraries: pipelines, Trainer, PEFT, device maps, tensor parallelism."""

import sys

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageClassification, pipeline

import hf_vit

from ..comparing import change_json
from ..comparing import logits as logits_of
from ..local_hub import readme_of
from ..processes import finish, start


@pytest.fixture
def images():
    generator = np.random.default_rng(0)
    sizes = ((31, 45), (20, 36), (64, 50))
    return [Image.fromarray(generator.integers(0, 255, (*size, 3), np.uint8)) for size in sizes]


@pytest.fixture
def pixel_values(folder, images):
    return AutoImageProcessor.from_pretrained(folder)(images, return_tensors="pt").pixel_values


def test_pipeline_for_features_has_no_random_weights(folder, images, pixel_values):
    model = AutoModelForImageClassification.from_pretrained(folder).eval()
    with torch.inference_mode():
        expected = model.vit(pixel_values)
    pooled = pipeline("image-feature-extraction", model=str(folder), pool=True)(images, return_tensors=True)
    tokens = pipeline("image-feature-extraction", model=str(folder))(images, return_tensors=True)
    torch.testing.assert_close(torch.cat(pooled), expected.pooler_output)
    torch.testing.assert_close(torch.cat(tokens), expected.last_hidden_state)


def test_trainer_trains_evaluates_and_pushes(hub, client, folder, tmp_path):
    output = client(
        f"""
        import numpy as np, torch, hf_vit
        from tests.comparing import assert_same_weights
        from transformers import Trainer, TrainingArguments

        model, processor = hf_vit.load({str(folder)!r})
        torch.manual_seed(0)
        labels = [0, 1] * 8
        data = [{{"pixel_values": torch.full((3, 20, 36), 2.0 * label - 1), "labels": label}} for label in labels]
        arguments = TrainingArguments({str(tmp_path / "out")!r}, max_steps=12, learning_rate=0.05, report_to="none",
            per_device_train_batch_size=8, push_to_hub=True, hub_model_id="alice/trained", use_cpu=True,
            disable_tqdm=True, save_strategy="steps", save_steps=6, eval_strategy="steps", eval_steps=6)
        accuracy = lambda outputs: {{"accuracy": float(np.mean(outputs.predictions.argmax(-1) == outputs.label_ids))}}
        trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=data, compute_metrics=accuracy,
                          processing_class=processor)
        before = trainer.evaluate()["eval_loss"]
        trainer.train()
        after = trainer.evaluate()
        assert after["eval_loss"] < before / 2 and after["eval_accuracy"] == 1, (before, after)
        trainer.push_to_hub()
        there, its_processor = hf_vit.load("alice/trained")
        assert_same_weights(model, there)
        resumed = Trainer(hf_vit.load({str(folder)!r})[0], arguments, train_dataset=data, eval_dataset=data)
        resumed.train(resume_from_checkpoint=True)
        assert resumed.state.global_step == 12
        print(dict(its_processor.size))
        """
    )
    assert output.splitlines()[-1] == "{'height': 20, 'width': 36}"
    client(["push", tmp_path / "out", "alice/trained", "--license", "mit"])
    readme = readme_of(hub, "alice/trained")
    assert "`hf-vit card`" in readme
    assert "license: mit" in readme
    assert "More information needed" not in readme
    assert "## Training procedure" in readme  # what Trainer did know stays


LORA = ["q_proj", "v_proj"]


LAYERS = {"vit.embeddings": "cpu", "vit.layers.0": "cpu", "vit.layers.1": "disk", "vit.layers.2": "cpu"}
DEVICE_MAPS = {
    "auto": {"device_map": "auto"},
    "offloaded": {"device_map": {**LAYERS, "vit.layernorm": "disk", "vit.pooler": "cpu", "classifier": "disk"}},
    "auto with little memory": {"device_map": "auto", "max_memory": {"cpu": 14_000}},
}


@pytest.mark.parametrize("kind", DEVICE_MAPS)
def test_device_maps(folder, pixel_values, tmp_path, kind):
    pytest.importorskip("accelerate")
    disk, options = tmp_path / "disk", DEVICE_MAPS[kind]
    model = AutoModelForImageClassification.from_pretrained(folder, offload_folder=disk, **options)
    assert (kind == "auto") == ("disk" not in getattr(model, "hf_device_map", {}).values())
    expected = logits_of(AutoModelForImageClassification.from_pretrained(folder), pixel_values)
    torch.testing.assert_close(logits_of(model, pixel_values), expected)


TENSOR_PARALLEL = """
import torch
import hf_vit

torch.set_num_threads(1)
torch.distributed.init_process_group("gloo")
model = hf_vit.HfViTForImageClassification.from_pretrained({folder!r}, tp_plan="auto").eval()
weight = model.vit.layers[0].mlp.fc1.weight
local = weight.to_local() if hasattr(weight, "to_local") else weight
assert local.shape == (11, 14), local.shape  # half of the 22 rows
with torch.inference_mode():
    logits = model(torch.load({folder!r} + "/pixel_values.pt", weights_only=True)).logits
if torch.distributed.get_rank() == 0:
    torch.save(logits, {folder!r} + "/logits.pt")
torch.distributed.barrier()
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_tensor_parallel_on_two_processes(folder, pixel_values):
    torch.save(pixel_values, folder / "pixel_values.pt")
    finish(start(TENSOR_PARALLEL.format(folder=str(folder)), processes=2))
    expected = logits_of(AutoModelForImageClassification.from_pretrained(folder), pixel_values)
    torch.testing.assert_close(torch.load(folder / "logits.pt", weights_only=True), expected)


@pytest.mark.parametrize("num_labels", [11, 5])
def test_load_merges_an_adapter_with_its_base(folder, pixel_values, tmp_path, num_labels):
    """Judged by PEFT's own loading: same logits, also with another head and at another image size."""
    peft = pytest.importorskip("peft")
    base = AutoModelForImageClassification.from_pretrained(folder, num_labels=num_labels)
    config = peft.LoraConfig(r=3, target_modules=LORA, modules_to_save=["classifier"], init_lora_weights=False)
    adapted = peft.get_peft_model(base, config)
    torch.nn.init.normal_(adapted.get_base_model().classifier.modules_to_save["default"].weight)
    adapted.save_pretrained(tmp_path / "adapter")
    fresh = AutoModelForImageClassification.from_pretrained(folder, num_labels=num_labels)
    theirs = peft.PeftModel.from_pretrained(fresh, tmp_path / "adapter")
    expected = logits_of(theirs, pixel_values)

    model, processor = hf_vit.load(tmp_path / "adapter")
    assert type(model) is hf_vit.HfViTForImageClassification
    assert len(model.config.id2label) == num_labels
    torch.testing.assert_close(logits_of(model, pixel_values), expected, rtol=0, atol=1e-5)
    theirs.get_base_model().set_image_size((40, 36))
    model, processor = hf_vit.load(tmp_path / "adapter", image_size=(40, 36))
    larger = processor(np.zeros((40, 36, 3), np.uint8), return_tensors="pt").pixel_values
    torch.testing.assert_close(logits_of(model, larger), logits_of(theirs, larger), rtol=0, atol=1e-5)


def test_revisions_of_a_model_and_of_the_base_of_an_adapter(hub, client, folder, tmp_path):
    """Judged by the bias of each revision: the second is larger by 5. An adapter keeps the base it was trained on."""
    output = client(f"""
        import hf_vit, peft, torch
        from huggingface_hub import HfApi

        hf_vit.push({str(folder)!r}, "alice/base", license="mit")
        first = HfApi().model_info("alice/base").sha
        model, processor = hf_vit.load({str(folder)!r})
        adapted = peft.get_peft_model(model, peft.LoraConfig(r=3, target_modules={LORA!r}), revision=first)
        adapted.peft_config["default"].base_model_name_or_path = "alice/base"
        adapted.save_pretrained({str(tmp_path / "adapter")!r})
        model, processor = hf_vit.load({str(folder)!r})
        old = model.classifier.bias.detach().clone()
        model.classifier.bias.data += 5
        model.save_pretrained({str(tmp_path / "changed")!r})
        processor.save_pretrained({str(tmp_path / "changed")!r})
        hf_vit.push({str(tmp_path / "changed")!r}, "alice/base", license="mit")
        for name in ("alice/base", "alice/base@" + first, {str(tmp_path / "adapter")!r}):
            print((hf_vit.load(name)[0].classifier.bias - old).mean().item())
        print(first)
    """)
    newest, named, of_adapter, first = output.split()[-4:]
    assert [float(newest), float(named), float(of_adapter)] == pytest.approx([5, 0, 0], abs=1e-5)
    fingerprints = {client(["fingerprint", name]) for name in ("alice/base@" + first, str(folder))}
    assert len(fingerprints) == 1
    client(["convert", "alice/base@missing", tmp_path / "none"], status=2)


def test_an_adapter_that_cannot_be_loaded(folder, tmp_path, monkeypatch):
    peft = pytest.importorskip("peft")
    model = AutoModelForImageClassification.from_pretrained(folder)
    peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=LORA)).save_pretrained(tmp_path)
    settings = (tmp_path / "adapter_config.json").read_text()
    changes = [({"base_model_name_or_path": wrong}, "base_model_name_or_path") for wrong in (None, ["a"], {})]
    changes += [({"base_model_name_or_path": "gone"}, "gone"), ({"target_modules": ["fc1"]}, "adapter")]
    for change, message in changes:
        change_json(tmp_path / "adapter_config.json", auto_mapping=["a"], **change)
        with pytest.raises((ValueError, OSError), match=message):
            hf_vit.load(tmp_path)
        (tmp_path / "adapter_config.json").write_text(settings)
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ImportError, match="hf_vit"):
        hf_vit.load(tmp_path)
