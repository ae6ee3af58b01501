"""Loading of a folder, and classification."""

import json
from functools import partial

import pytest
import torch
import transformers
from huggingface_hub import cached_assets_path
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers.utils import logging

import hf_vit
from hf_vit.conversion import cache, convert, export
from hf_vit.inference.predictor import predict
from hf_vit.loading import find_model, load, load_processor, model_and_processor, resolve_model

from .comparing import change_json
from .tiny_models import TINY, load_model, save_tiny, tiny, write_images

TINY_CONFIG = hf_vit.HfViTConfig(**TINY)


def test_load_returns_model_and_processor(folder):
    model, processor = load(folder)
    assert type(model) is hf_vit.HfViTForImageClassification
    assert not model.training
    assert type(processor) is hf_vit.HfViTImageProcessor
    (folder / "preprocessor_config.json").unlink()
    assert load_processor(folder, model.config) is None


@pytest.mark.parametrize(
    ("head", "named"),
    [
        ({"bias": (11,)}, r"classifier\.weight"),
        ({"bias": (11,), "weigth": (11, 14)}, r"classifier\.weight"),
        ({"bias": (11, 1), "weight": (11, 14)}, r"classifier\.bias"),
        ({"bias": (11,), "weight": (11, 14), "scale": (11,)}, r"classifier\.scale"),
    ],
)
def test_an_incomplete_head_is_refused(folder, head, named):
    """A complete head may be new; a head that lacks an array is damaged."""
    weights = load_file(folder / "model.safetensors")
    weights = {name: array for name, array in weights.items() if not name.startswith("classifier.")}
    weights |= {f"classifier.{name}": torch.ones(shape) for name, shape in head.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=named):
        load_model(folder)


@pytest.mark.parametrize("source", ["model.npz", "timm.safetensors", "timm", "transformers"])
def test_commands_convert_a_checkpoint_once(tmp_path, source):
    """The logits of the converted folder are those of `convert`."""
    model = tiny(hidden_size=192, num_attention_heads=3, image_size=32, patch_size=8)
    export(model, tmp_path / "model.npz", "jax")
    export(model, tmp_path / "timm.safetensors", "timm")
    export(model, tmp_path / "timm", "timm")
    export(model, tmp_path / "transformers", "transformers")
    folder = resolve_model(tmp_path / source)
    written = (folder / "model.safetensors").stat().st_mtime_ns
    loaded, pixel_values = load_model(folder), torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(loaded(pixel_values).logits, convert(tmp_path / source)[0](pixel_values).logits)
    assert resolve_model(tmp_path / source) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    assert str(resolve_model(folder)) == str(folder)


def test_a_changed_checkpoint_is_converted_again(tmp_path, monkeypatch):
    export(tiny(seed=1, hidden_size=64, num_attention_heads=1, image_size=32, patch_size=8), tmp_path / "a.npz", "jax")
    first = find_model(tmp_path / "a.npz")
    monkeypatch.setattr("hf_vit.conversion.cache.CONVERSION_VERSION", 0)
    assert find_model(tmp_path / "a.npz").name != first.name
    monkeypatch.undo()
    assert find_model(tmp_path / "a.npz") == first
    export(
        tiny(seed=2, hidden_size=64, num_attention_heads=1, image_size=32, patch_size=8),
        tmp_path / "a.npz",
        "jax",
        overwrite=True,
    )
    assert find_model(tmp_path / "a.npz").name != first.name


def test_a_cached_conversion_says_again_what_it_assumed(tmp_path, caplog):
    """One warning for each file and process: the class token's heads and GELU, which no array shows."""
    file = tmp_path / "bare.safetensors"
    export(tiny(seed=4, hidden_size=192, num_attention_heads=3, image_size=32, patch_size=8), file, "timm")
    said = []
    for _ in range(3):
        caplog.clear()
        load(file)
        said.append([text for text in caplog.messages if "bare.safetensors" in text])
        logging.get_logger("hf_vit").warning_once.cache_clear()  # as in another process
    assert said[0] == said[1] == said[2]
    assert len(said[0]) == 1
    assert "num_attention_heads 3" in said[0][0]
    assert "hidden_act gelu" in said[0][0]
    load(file)
    caplog.clear()
    load(file)
    assert caplog.messages == []


def test_a_set_of_weights_and_a_head_are_chosen(tmp_path):
    """As by `convert`; a folder of hf_vit has no choice."""
    first, second = (
        tiny(seed=seed, hidden_size=192, num_attention_heads=3, image_size=32, patch_size=8) for seed in (5, 6)
    )
    for number, model in enumerate((first, second)):
        export(model, tmp_path / f"{number}.safetensors", "timm")
    raw, averaged = (load_file(tmp_path / f"{number}.safetensors") for number in (0, 1))
    named = {name.replace("head.", "fc."): array for name, array in raw.items()}
    torch.save({"model": named, "ema": averaged}, tmp_path / "run.pth")
    options = {"weights": "model", "head_name": "fc"}
    for found, expected in (
        (load_model(tmp_path / "run.pth", **options), first),
        (load_model(tmp_path / "run.pth"), second),
    ):
        assert torch.equal(found.classifier.weight, expected.classifier.weight)
    with pytest.raises(ValueError, match="other"):
        load(tmp_path / "run.pth", weights="other")
    with pytest.raises(ValueError, match="head_name"):
        load(save_tiny(tmp_path / "ours"), **options)


def test_the_grid_of_a_file_is_stated(tmp_path):
    model = tiny(image_size=(32, 48), patch_size=8)
    export(model, tmp_path / "rectangle.npz", "jax")
    with pytest.raises(ValueError, match="position_grid"):
        load(tmp_path / "rectangle.npz")
    found, processor = load(tmp_path / "rectangle.npz", position_grid=(4, 6))
    assert tuple(found.config.image_size) == (32, 48)
    assert (processor.size["height"], processor.size["width"]) == (32, 48)
    assert torch.equal(found.vit.embeddings.position_embeddings, model.vit.embeddings.position_embeddings)


def test_a_cache_that_cannot_be_written(tmp_path, monkeypatch):
    """A folder of hf_vit needs none; an entry that exists is used."""
    (tmp_path / "file").touch()
    model = tiny(seed=3, hidden_size=64, num_attention_heads=1, image_size=32, patch_size=8)
    export(model, tmp_path / "b.npz", "jax")
    monkeypatch.setattr(cache, "cached_assets_path", partial(cached_assets_path, assets_dir=tmp_path / "file"))
    with pytest.raises(OSError, match="HF_ASSETS_CACHE"):
        load(tmp_path / "b.npz")
    load(save_tiny(tmp_path / "ours"))


@pytest.mark.parametrize("head", ["keep", "none", "new"])
@pytest.mark.parametrize("name", ["Swin", "DeiT", "ConvNext"])
def test_architectures_that_are_not_converted(tmp_path, head, name):
    """They are refused before any weights are read, by their type."""
    config = getattr(transformers, f"{name}Config")()
    config.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ValueError, match=config.model_type):
        load(tmp_path, head=head, labels=3 if head == "new" else None)


@pytest.mark.parametrize("name", ["Model", "Backbone", "ForImageClassification", "ForMaskedPatchPrediction"])
def test_a_hybrid_saved_as_a_plain_model_is_loaded_as_a_hybrid(name, tmp_path):
    """Such as the encoder of a classifier."""
    plain, hybrid = getattr(hf_vit, f"HfViT{name}"), getattr(hf_vit, f"HfViTHybrid{name}")
    model = plain(tiny(hybrid=True).config)
    model.save_pretrained(tmp_path)
    loaded = load_model(tmp_path)
    assert type(loaded) is hybrid
    torch.testing.assert_close(loaded.state_dict(), model.state_dict(), rtol=0, atol=0)
    with pytest.raises(ValueError, match="hf_vit_hybrid"):
        plain.from_pretrained(tmp_path)


def test_a_pair_of_objects_predicts_like_its_folder(folder, tmp_path):
    model, processor = load(folder)
    files = sorted(write_images(tmp_path / "images", 3).iterdir())
    expected = predict((model, processor), [Image.open(file).copy() for file in files], top_k=3)
    assert predict(folder, files, top_k=3, batch_size=2) == [
        [(label, pytest.approx(score, rel=1e-4)) for label, score in one] for one in expected
    ]


WRONG_MODELS = {  # what is given as a model -> a part of the sentence
    "model": (lambda model, processor: model, "HfViTForImageClassification"),
    "swapped pair": (lambda model, processor: (processor, model), "HfViTImageProcessor, HfV"),
    "tuple of one": (lambda model, processor: (model,), "HfViTForImageClassification"),
    "list": (lambda model, processor: [model, processor], "list"),
    "none": (lambda model, processor: None, "NoneType"),
}


@pytest.mark.parametrize("wrong", WRONG_MODELS)
@pytest.mark.parametrize(
    "function",
    ["load", "predict", "embed", "evaluate", "audit", "finetune", "calibrate", "plan", "push", "quantize"],
)
def test_what_is_no_model_gets_one_sentence(folder, tmp_path, wrong, function):
    make, part = WRONG_MODELS[wrong]
    arguments = {
        "load": (),
        "finetune": (tmp_path, tmp_path / "out"),
        "calibrate": (tmp_path, tmp_path / "out"),
        "push": ("me/model",),
        "quantize": (tmp_path / "out", []),
    }.get(function, (tmp_path,))
    given = make(*load(folder))
    if function == "plan":  # from the images to the model
        if given is None:
            return
        given, arguments = tmp_path, (given,)
    with pytest.raises(ValueError, match="folder") as found:
        getattr(hf_vit, function)(given, *arguments)
    assert part in str(found.value)
    assert len(str(found.value)) < 200  # a printed network has thousands


def test_a_name_or_a_pair_is_a_model_and_its_processor(folder):
    pair = load(folder)
    assert model_and_processor(pair) is pair
    assert [type(one) for one in model_and_processor(folder)] == [type(one) for one in pair]
    with pytest.raises(ValueError, match="use_backend"):
        model_and_processor(pair, "torch")


def test_heads(folder, tmp_path):
    """The encoder's weights are those of the folder with every head; a new head is zero."""
    kept, _ = load(folder)
    bare, _ = load(folder, head="none")
    new, _ = load(folder, head="new", labels=["a", "b", "c"])
    assert [type(one).__name__ for one in (bare, new)] == ["HfViTModel", "HfViTForImageClassification"]
    assert (new.config.num_labels, new.config.id2label[2], new.config.label2id["b"]) == (3, "c", 1)
    assert new.classifier.weight.shape == (3, 14)
    assert not new.classifier.weight.any()
    assert not new.classifier.bias.any()
    for other in (bare, new.base_model):
        assert other.state_dict().keys() == kept.base_model.state_dict().keys()
        for name, array in kept.base_model.state_dict().items():
            assert torch.equal(other.state_dict()[name], array)
    bare.save_pretrained(tmp_path / "bare")
    again, _ = load(tmp_path / "bare", head="new", labels=5)
    assert again.config.id2label == {index: f"LABEL_{index}" for index in range(5)}
    with pytest.raises(ValueError, match="labels"):
        load(folder, head="new")
    with pytest.raises(ValueError, match="head"):
        load(folder, labels=5)


def test_a_new_head_replaces_the_pre_logits_layer(tmp_path):
    """Section 3.2 of the paper; `keep_pre_logits` keeps it."""
    save_tiny(tmp_path / "model", representation_size=9)
    assert load(tmp_path / "model", head="new", labels=3)[0].classifier.weight.shape == (3, 14)
    model, _ = load(tmp_path / "model", head="new", labels=3, keep_pre_logits=True)
    assert model.classifier.weight.shape == (3, 9)
    assert model.config.representation_size == 9


def test_a_stored_head_without_weights_is_refused(folder):
    weights = load_file(folder / "model.safetensors")
    weights = {name: array for name, array in weights.items() if not name.startswith("classifier.")}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"classifier\.weight"):
        load(folder)
    assert not load(folder, head="new", labels=11)[0].classifier.weight.any()
    assert load(folder, head="none")[0].config.num_labels == 11


def test_predict_refuses_a_model_without_head(folder):
    with pytest.raises(ValueError, match="HfViTModel"):
        predict(load(folder, head="none"), [])


def test_requests_of_loading_from_the_hub(hub, client):
    """Each file and the branch's commit are requested once, as by transformers' own models."""
    client("""
        from hf_vit import HfViTConfig, HfViTModel
        HfViTModel(HfViTConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=6,
                               image_size=20, patch_size=5)).push_to_hub("alice/vit", private=True)
    """)
    hub.requests.clear()
    client("""
        from hf_vit import HfViTModel
        HfViTModel.from_pretrained("alice/vit")
    """)
    asked = [(one["method"], one["path"].rpartition("/")[2]) for one in hub.requests if "/resolve/" in one["path"]]
    assert asked.count(("HEAD", "config.json")) == asked.count(("GET", "config.json")) == 1
    assert asked.count(("HEAD", "model.safetensors")) == 1
    assert len([one for one in hub.requests if "/revision/main" in one["path"]]) == 1


def test_a_mistyped_folder_is_not_requested_from_the_hub(monkeypatch):
    monkeypatch.setattr("hf_vit.loading.find_adapter_config_file", lambda *_, **__: pytest.fail("requested"))
    with pytest.raises(OSError, match="mistyped"):
        load("mistyped")


@pytest.mark.parametrize("file", ["config.json", "preprocessor_config.json", "processor_config.json"])
def test_code_of_a_folder_never_runs_and_no_prompt_appears(folder, monkeypatch, file):
    from hf_vit.analysis.compute import load_config

    monkeypatch.setattr("builtins.input", lambda prompt: pytest.fail("asked at a prompt"))
    (folder / "evil.py").write_text("raise SystemExit('code of the folder ran')")
    content = {"image_processor_type": "Evil", "processor_class": "Evil", "model_type": "evil"}
    content["auto_map"] = dict.fromkeys(("AutoConfig", "AutoModel", "AutoImageProcessor", "AutoProcessor"), "evil.Evil")
    if file == "processor_config.json":
        (folder / "preprocessor_config.json").unlink()
        content = {"image_processor": content}
    (folder / file).write_text(json.dumps(content))
    for read in [load, load_config if file == "config.json" else lambda folder: load_processor(folder, TINY_CONFIG)]:
        with pytest.raises((ValueError, OSError)):
            read(str(folder))


@pytest.mark.parametrize("field", ["attn_implementation", "_attn_implementation"])
def test_a_file_cannot_choose_a_repository_of_kernels(folder, field):
    config = (folder / "config.json").read_text()
    change_json(folder / "config.json", **{field: "owner/kernel"})
    for auto_class in (hf_vit.HfViTForImageClassification, transformers.AutoModelForImageClassification):
        with pytest.raises(ValueError, match="owner/kernel"):
            auto_class.from_pretrained(folder)
    (folder / "config.json").write_text(config)
    change_json(folder / "config.json", _attn_implementation_internal="owner/kernel")
    assert "/" not in hf_vit.HfViTForImageClassification.from_pretrained(folder).config._attn_implementation
