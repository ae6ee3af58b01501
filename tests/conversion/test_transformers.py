"""transformers' own ViTs: reading folders of transformers 4 and 5, and writing folders for transformers."""

import copy
import json
import os
import re

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import hf_vit
from hf_vit import HfViTConfig, HfViTForImageClassification, HfViTImageProcessor, HfViTModel
from hf_vit.cli import main
from hf_vit.conversion import ConversionError, convert, export, fingerprint
from hf_vit.conversion.tables import TIMM_NUMBERS
from hf_vit.loading import save_folder
from hf_vit.models.modeling_masked_patch_prediction import Corruption, HfViTForMaskedPatchPrediction, patch_targets

from ..comparing import assert_same_file, assert_same_weights, change_json
from ..tiny_models import SAME_PADDING, SIZES, TINY, load_model, randomize, tiny, tiny_bit

OURS = {**SIZES, "num_hidden_layers": 2, "image_size": 20, "patch_size": 4, "num_labels": 11}
SQUARE = {**OURS, "encoder_stride": 4}


def their_model(name, **changes):
    return randomize(getattr(transformers, name)(transformers.ViTConfig(**SQUARE | changes)))


def run(model, pixel_values, **kwargs):
    with torch.no_grad():
        return model(pixel_values, **kwargs)


def assert_close(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


PIXELS = torch.randn(3, 3, 20, 20, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("in_names_of_4", [True, False])
@pytest.mark.parametrize(
    "changes", [{}, {"hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-3, "qkv_bias": False}]
)
def test_classifiers_load_directly(tmp_path, in_names_of_4, changes):
    theirs = their_model("ViTForImageClassification", **changes)
    theirs.save_pretrained(tmp_path, save_original_format=in_names_of_4)
    assert ("vit.encoder.layer.0.output.dense.bias" in load_file(tmp_path / "model.safetensors")) == in_names_of_4
    ours = load_model(tmp_path)
    assert ours.config.hidden_act == theirs.config.hidden_act
    assert ours.config.layer_norm_eps == theirs.config.layer_norm_eps
    assert_close(run(ours.eval(), PIXELS).logits, run(theirs, PIXELS).logits)


def test_models_with_and_without_a_pooler(tmp_path):
    theirs = their_model("ViTModel", pooler_output_size=9)
    theirs.save_pretrained(tmp_path / "pooler")
    ours = load_model(tmp_path / "pooler")
    assert ours.config.representation_size == 9
    assert_close(run(ours, PIXELS).pooler_output, run(theirs, PIXELS).pooler_output)
    bare = randomize(transformers.ViTModel(theirs.config, add_pooling_layer=False))
    bare.save_pretrained(tmp_path / "bare")
    ours = load_model(tmp_path / "bare")
    assert ours.config.representation_size is None
    output = run(bare, PIXELS).last_hidden_state
    assert_close(run(ours, PIXELS).last_hidden_state, output)
    assert_close(run(ours, PIXELS).pooler_output, output[:, 0])


def test_the_encoder_of_masked_autoencoders(tmp_path):
    sizes = {**SQUARE, "decoder_hidden_size": 8, "decoder_num_attention_heads": 2, "decoder_num_hidden_layers": 1}
    mae = transformers.ViTMAEForPreTraining(
        transformers.ViTMAEConfig(**sizes, decoder_intermediate_size=6, mask_ratio=0.0)
    )
    positions = mae.vit.embeddings.position_embeddings.clone()  # fixed sines, which stay as they are
    randomize(mae).vit.embeddings.position_embeddings.data = positions
    mae.save_pretrained(tmp_path / "mae")
    ours, _ = convert(tmp_path / "mae")
    assert ours.config.representation_size is None
    in_order = run(mae.vit, PIXELS, noise=torch.arange(25.0).expand(3, -1)).last_hidden_state
    assert_close(run(ours, PIXELS).last_hidden_state, in_order)
    assert all("decoder." in name for name in ours.conversion_record["other_parts"])


def test_masked_image_models_in_both_directions(tmp_path):
    theirs = their_model("ViTForMaskedImageModeling")
    theirs.save_pretrained(tmp_path / "theirs")
    ours, _ = convert(tmp_path / "theirs")
    assert isinstance(ours, HfViTForMaskedPatchPrediction)
    masked = torch.rand(3, 25, generator=torch.Generator().manual_seed(2)) < 0.4
    expected, output = (run(model, PIXELS, bool_masked_pos=masked) for model in (theirs, ours))
    assert_close(output.logits, patch_targets(expected.reconstruction, (5, 5), "pixels"))
    selected = run(ours, PIXELS, corruption=Corruption(masked, masked, torch.arange(25).expand(3, -1)))
    torch.testing.assert_close((selected.logits, selected.loss), (output.logits, output.loss), rtol=0, atol=0)
    ours.save_pretrained(tmp_path / "ours")
    again = HfViTForMaskedPatchPrediction.from_pretrained(tmp_path / "ours")
    export(again, tmp_path / "back", "transformers")
    back = transformers.ViTForMaskedImageModeling.from_pretrained(tmp_path / "back")
    assert_same_weights(back, theirs)
    assert_close(run(back.eval(), PIXELS, bool_masked_pos=masked).reconstruction, expected.reconstruction)
    classifier = HfViTForImageClassification.from_pretrained(tmp_path / "ours", num_labels=5)
    torch.testing.assert_close(classifier.vit.layernorm.weight, theirs.vit.layernorm.weight, rtol=0, atol=0)


def test_masked_image_models_that_transformers_does_not_support(tmp_path):
    def predicting(target, image_size=20):
        return HfViTForMaskedPatchPrediction(HfViTConfig(**OURS | {"image_size": image_size}, patch_target=target))

    with pytest.raises(ConversionError, match="patch_target"):
        export(predicting("mean_color"), tmp_path / "out", "transformers")
    with pytest.raises(ConversionError, match=r"\(5, 7\)"):
        export(predicting("pixels", (20, 28)), tmp_path / "out", "transformers")
    their_model("ViTForMaskedImageModeling").save_pretrained(tmp_path / "theirs")
    with pytest.raises(ConversionError, match="head"):
        convert(tmp_path / "theirs", labels=["a"] * 11)
    their_model("ViTForMaskedImageModeling", encoder_stride=2).save_pretrained(tmp_path / "strides")
    assert isinstance(convert(tmp_path / "strides")[0], HfViTModel)  # its decoder shrinks: only the encoder is read
    assert not (tmp_path / "out").exists()


def test_another_resolution_is_that_of_transformers(tmp_path):
    theirs = their_model("ViTForImageClassification")
    theirs.save_pretrained(tmp_path)
    larger = torch.randn(2, 3, 28, 28)
    expected = run(theirs, larger, interpolate_pos_encoding=True).logits
    for ours in (load_model(tmp_path), load_model(tmp_path, image_size=28)):
        assert_close(run(ours, larger).logits, expected)


# transformers 4's vit-hybrid: a Bit backbone, whose last map a ViT sees in patches of one pixel.
BIT = {
    "embedding_size": 32,
    "hidden_sizes": [128, 256],
    "depths": [2, 1],
    "layer_type": "bottleneck",
    "global_padding": "same",
    "embedding_dynamic_padding": True,
    "out_features": ["stage2"],
}


class UpstreamHybrid(torch.nn.Module):
    """The reference: upstream's BitBackbone followed by upstream's ViT, as in the old hybrid."""

    def __init__(self):
        super().__init__()
        self.backbone = randomize(transformers.BitBackbone(transformers.BitConfig(**BIT)))
        sizes = {**SQUARE, "image_size": (4, 6), "patch_size": 1, "num_channels": 256}
        self.vit = randomize(transformers.ViTForImageClassification(transformers.ViTConfig(**sizes)))

    def forward(self, pixel_values):
        return self.vit(self.backbone(pixel_values).feature_maps[-1]).logits

    def save(self, folder, with_head=True):
        """Write a folder in the format of transformers 4.57."""
        self.vit.save_pretrained(folder)  # in the names of version 4
        weights = load_file(folder / "model.safetensors")
        for name, array in self.backbone.state_dict().items():
            weights[f"vit.embeddings.patch_embeddings.backbone.{name}"] = array
        if not with_head:
            weights = {name.removeprefix("vit."): array for name, array in weights.items() if name[:3] == "vit"}
            weights |= {"pooler.dense.weight": torch.ones(14, 14), "pooler.dense.bias": torch.zeros(14)}
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        config = {"model_type": "vit-hybrid", "num_channels": 3, "image_size": [32, 48], "backbone_config": BIT}
        config |= {"backbone_featmap_shape": [1, 256, 4, 6], "backbone": None, "use_timm_backbone": False}
        architecture = "ViTHybridForImageClassification" if with_head else "ViTHybridModel"
        change_json(folder / "config.json", **config, architectures=[architecture])


HYBRID_PIXELS = torch.randn(2, 3, 32, 48, generator=torch.Generator().manual_seed(2))


def test_hybrids_convert(tmp_path):
    theirs = UpstreamHybrid()
    theirs.save(tmp_path / "hybrid")
    settings = {"size": {"shortest_edge": 40}, "image_mean": [0.5] * 3}
    settings["image_processor_type"] = "ViTHybridImageProcessor"
    (tmp_path / "hybrid" / "preprocessor_config.json").write_text(json.dumps(settings))
    assert main(["convert", str(tmp_path / "hybrid"), str(tmp_path / "ours")]) == 0
    for folder in ("hybrid", "ours"):
        ours = load_model(tmp_path / folder).eval()
        assert ours.config.weight_standardization_form == "variance"
        assert_close(run(ours, HYBRID_PIXELS).logits, run(theirs, HYBRID_PIXELS))
    record = json.loads((tmp_path / "ours" / "conversion.json").read_text())
    assert record["dialect"] == {"names": "transformers", "model_type": "vit-hybrid"}
    assert re.fullmatch("[0-9a-f]{64}", record["sha256"])
    saved = hf_vit.HfViTImageProcessor.from_pretrained(tmp_path / "ours")
    for processor in (saved, hf_vit.load(tmp_path / "hybrid")[1]):
        # resized to 40 for its default crop of 224, and so to 9 for a crop of the model's size
        sizes = processor.size, processor.crop_size
        assert (processor.resample, *sizes) == (3, {"shortest_edge": 9}, {"height": 32, "width": 48})
    processor = hf_vit.load(tmp_path / "hybrid", image_size=(64, 80))[1]
    assert processor(torch.zeros(3, 99, 77), return_tensors="pt").pixel_values.shape[2:] == (64, 80)


def test_bare_hybrids_load_directly(tmp_path):
    theirs = UpstreamHybrid()
    theirs.save(tmp_path / "hybrid", with_head=False)
    ours = load_model(tmp_path / "hybrid")
    expected = run(theirs.vit.vit, run(theirs.backbone, HYBRID_PIXELS).feature_maps[-1])
    assert_close(run(ours, HYBRID_PIXELS).last_hidden_state, expected.last_hidden_state)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_type": "preactivation"}, "layer_type"),
        ({"global_padding": None, "width_factor": 3}, "width_factor"),
    ],
)
def test_other_backbones_are_refused(tmp_path, changes, message):
    UpstreamHybrid().save(tmp_path / "hybrid")
    change_json(tmp_path / "hybrid" / "config.json", backbone_config=BIT | changes)
    with pytest.raises(ValueError, match=message):
        load_model(tmp_path / "hybrid")


def test_from_pretrained_of_our_classes_names_the_call_that_converts(tmp_path):
    their_model("ViTForImageClassification").save_pretrained(tmp_path)
    for our_class in (HfViTForImageClassification, hf_vit.HfViTHybridForImageClassification, HfViTConfig):
        with pytest.raises(ValueError, match=r"hf_vit\.load"):
            our_class.from_pretrained(tmp_path)


def test_shards_load(tmp_path):
    theirs = their_model("ViTForImageClassification")
    theirs.save_pretrained(tmp_path, max_shard_size="4KB")
    assert not (tmp_path / "model.safetensors").exists()
    assert_close(run(load_model(tmp_path), PIXELS).logits, run(theirs, PIXELS).logits)
    for content in ('{"weight_map": {"a": "../model.safetensors"}}', "{"):
        (tmp_path / "model.safetensors.index.json").write_text(content)
        with pytest.raises(ValueError, match="index"):
            load_model(tmp_path)


def test_arguments_of_from_pretrained(tmp_path):
    their_model("ViTForImageClassification").save_pretrained(tmp_path)
    model, _ = hf_vit.load(tmp_path, num_labels=5, dtype=torch.float64, attn_implementation="eager")
    assert (model.dtype, model.config._attn_implementation) == (torch.float64, "eager")
    assert not run(model, PIXELS.double()).logits.any()  # a head of zeros


def test_folders_convert_with_their_processor(tmp_path):
    their_model("ViTForImageClassification", image_size=(20, 36)).save_pretrained(tmp_path)
    theirs = transformers.ViTImageProcessor(size={"height": 20, "width": 36}, image_std=[0.2, 0.3, 0.4])
    theirs.save_pretrained(tmp_path)
    for options, size in (({"image_size": 24}, (24, 24)), ({}, (20, 36))):
        model, processor = convert(tmp_path, **options)
        assert (processor.preset, processor.image_std) == ("transformers", [0.2, 0.3, 0.4])
        assert processor(np.zeros((50, 70, 3), np.uint8)).pixel_values[0].shape == (3, *size)
    assert model.config.id2label == {index: f"LABEL_{index}" for index in range(11)}


def test_written_files_contain_no_local_folder(tmp_path):
    source = tmp_path / "private" / "theirs"
    their_model("ViTForImageClassification").save_pretrained(source)
    model, processor = convert(source)
    save_folder(tmp_path / "out", model, processor)
    assert json.loads((tmp_path / "out" / "conversion.json").read_text())["source"] == "theirs"
    for file in (tmp_path / "out").glob("*.json"):
        assert "private" not in file.read_text(), file


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vit.layernorm.bias": None}, "vit.layernorm.bias"),
        ({"vit.extra": torch.ones(2)}, "vit.extra"),
        ({"vit.layernorm.bias": torch.ones(15)}, r"vit.layernorm.bias"),
        ({"classifier.bias": None}, "classifier.bias"),
        ({"classifier.bias": None, "classifier.weight": None}, "classifier.weight"),
        ({"classifier.bias": torch.full((11,), torch.inf)}, "classifier.bias"),
    ],
)
def test_wrong_weights_are_listed(tmp_path, changes, message):
    their_model("ViTForImageClassification").save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors") | changes
    weights = {name: array for name, array in weights.items() if array is not None}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConversionError, match=message):
        convert(tmp_path)


def test_wrong_folders(tmp_path):
    their_model("ViTForImageClassification").save_pretrained(tmp_path / "vit")
    os.remove(tmp_path / "vit" / "model.safetensors")
    with pytest.raises(ConversionError, match="safetensors"):
        convert(tmp_path / "vit")
    (tmp_path / "vit" / "model.safetensors").touch()
    wrong = {'{"model_type": "bert"}': "bert", '{"model_type": "hf_vit"}': "hf_vit", "{": r"config\.json"}
    for text, message in wrong.items():
        (tmp_path / "vit" / "config.json").write_text(text)
        with pytest.raises(ValueError, match=message):
            convert(tmp_path / "vit")
    their_model("ViTModel", pooler_act="relu").save_pretrained(tmp_path / "relu")
    with pytest.raises(ConversionError, match="pooler_act"):
        convert(tmp_path / "relu")


def test_a_jax_checkpoint_for_transformers(goldens, tmp_path):
    """With tanh GELU and epsilon 1e-6, computed by upstream's own class."""
    model, processor = convert(goldens / "vit_token.npz")
    save_folder(tmp_path / "ours", model, processor)
    assert main(["export", str(tmp_path / "ours"), str(tmp_path / "theirs"), "--to", "transformers"]) == 0
    theirs = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "theirs").eval()
    assert type(theirs) is transformers.ViTForImageClassification
    assert (theirs.config.hidden_act, theirs.config.layer_norm_eps) == ("gelu_pytorch_tanh", 1e-6)
    pixel_values = torch.randn(2, 3, 32, 32)
    assert_close(run(theirs, pixel_values).logits, run(model, pixel_values).logits)
    assert transformers.ViTImageProcessor.from_pretrained(tmp_path / "theirs").size["height"] == 32
    export(convert(tmp_path / "theirs")[0], tmp_path / "back.npz", "jax")
    assert_same_file(tmp_path / "back.npz", goldens / "vit_token.npz")


def test_models_that_transformers_does_not_support(tmp_path):
    sizes = OURS | {"hidden_size": 16}
    for fields, message in (
        ({"pooling": "mean"}, "mean"),
        ({"position_embedding_type": "sincos2d"}, "sincos2d"),
        ({"representation_size": 9}, "representation_size"),
    ):
        with pytest.raises(ConversionError, match=message):
            export(HfViTForImageClassification(HfViTConfig(**sizes, **fields)), tmp_path / "out", "transformers")
    with pytest.raises(ConversionError, match="hf_vit_hybrid"):
        export(tiny(hybrid=True), tmp_path / "out", "transformers")
    with pytest.raises(ConversionError, match="HfViTBackbone"):
        export(hf_vit.HfViTBackbone(HfViTConfig(**sizes)), tmp_path / "out", "transformers")
    assert not list(tmp_path.iterdir())


def test_a_name_on_the_hub_converts(hub, client, tmp_path):
    theirs = their_model("ViTForImageClassification", id2label={i: f"kind {i}" for i in range(11)})
    theirs.save_pretrained(tmp_path / "theirs")
    client(f"""
        from huggingface_hub import HfApi
        HfApi().create_repo("alice/their-vit", private=True)
        HfApi().upload_folder(repo_id="alice/their-vit", folder_path={str(tmp_path / "theirs")!r})
    """)
    assert "alice/their-vit" in client(["convert", "alice/their-vit", tmp_path / "ours"])
    ours = load_model(tmp_path / "ours")
    assert_close(run(ours, PIXELS).logits, run(theirs, PIXELS).logits)
    assert ours.config.id2label[10] == "kind 10"
    client(["export", "alice/their-vit", tmp_path / "their.safetensors", "--to", "timm"])
    assert torch.equal(load_file(tmp_path / "their.safetensors")["head.weight"], theirs.classifier.weight)
    error = client(["convert", "alice/their-vit", tmp_path / "hidden"], token="hf_bob", status=2)
    assert "alice/their-vit" in error.splitlines()[0]


TOWERS = {  # a model of each kind that transformers computes, with settings that it does not have
    "classifier": lambda: tiny(drop_path_rate=0.1, position_interpolation="bicubic"),
    "encoder": lambda: randomize(HfViTModel(HfViTConfig(**TINY, image_size_history=[16]))),
    "pre-logits": lambda: randomize(HfViTModel(HfViTConfig(**TINY, representation_size=9))),
    "siglip": lambda: randomize(HfViTModel(HfViTConfig(**OURS | {"num_labels": 2}, pooling="map"))),
    "bit": lambda: tiny_bit(**TIMM_NUMBERS, padding="same"),
    "several labels": lambda: tiny(problem_type="multi_label_classification", label_thresholds=[0.25] * 11),
    "calibrated": lambda: tiny(temperature=1.5, coverage_thresholds={"0.9": 0.1}, rejection_thresholds=[0.5] * 11),
    "bit, several labels": lambda: tiny_bit(**TIMM_NUMBERS, padding="same", problem_type="multi_label_classification"),
}


@pytest.mark.parametrize("kind", TOWERS)
def test_a_folder_for_transformers_gives_the_same_model_back(tmp_path, kind):
    model = TOWERS[kind]()
    processor = HfViTImageProcessor.for_model(model.config, preset="augreg")
    picture = np.random.default_rng(0).integers(0, 255, (61, 83, 3), np.uint8)
    export(model, tmp_path / "out", "transformers", processor=processor)

    has_logits = hasattr(model, "classifier")
    auto = transformers.AutoModelForImageClassification if has_logits else transformers.AutoModel
    theirs, loading = auto.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(loading.values())
    again, its_processor = hf_vit.load(tmp_path / "out")
    pixels = its_processor(picture, return_tensors="pt").pixel_values
    assert torch.equal(pixels, processor(picture, return_tensors="pt").pixel_values)
    for name in ("logits",) if has_logits else ("last_hidden_state", "pooler_output"):
        expected = run(model, pixels)[name]
        torch.testing.assert_close(run(theirs, pixels)[name].flatten(1), expected.flatten(1), rtol=1e-6, atol=1e-5)
        torch.testing.assert_close(run(again, pixels)[name], expected, rtol=0, atol=1e-6)
    stored = again.config.to_dict()
    unlike = {name for name, value in model.config.to_dict().items() if stored[name] != value}
    assert unlike <= {"_name_or_path", "architectures", "dtype", *(["image_size"] if "bit" in kind else [])}  # (N, N)
    assert theirs.config.problem_type == model.config.problem_type  # of their pipeline and their loss
    assert its_processor.to_dict() == processor.to_dict()


def test_settings_changed_in_transformers_win(tmp_path):
    model = tiny(image_size=(20, 20), patch_size=(4, 4))
    export(
        model, tmp_path / "out", "transformers", processor=HfViTImageProcessor.for_model(model.config, preset="augreg")
    )
    theirs = transformers.AutoImageProcessor.from_pretrained(tmp_path / "out", image_mean=[0.1, 0.2, 0.3])
    theirs.save_pretrained(tmp_path / "out")
    _, processor = hf_vit.load(tmp_path / "out")
    assert (processor.preset, processor.image_mean) == ("transformers", [0.1, 0.2, 0.3])


def test_convert_for_transformers_keeps_the_record(tmp_path, goldens, capsys, run_command):
    source = str(goldens / "vit_token.npz")
    run_command(["convert", source, tmp_path / "out", "--for", "transformers"])
    assert hf_vit.load(tmp_path / "out")[0].conversion_record == convert(source)[0].conversion_record
    assert fingerprint(tmp_path / "out") == fingerprint(source)
    assert main(["convert", str(goldens / "vit_gap.npz"), str(tmp_path / "gap"), "--for", "transformers"]) == 2
    assert not (tmp_path / "gap").exists()
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ({str(index): index for index in range(11)}, "0"),  # numbers
        ({str(index + 1): f"kind {index}" for index in range(11)}, "kind 0"),  # counted from 1
        ({str(index): None for index in range(11)}, "LABEL_0"),
        ({"0": "a", "1": "b"}, "11 classes.*2"),
        (None, "11 classes.*2"),  # transformers' default
    ],
)
def test_class_names_that_transformers_accepts_are_read(tmp_path, names, expected):
    their_model("ViTForImageClassification").save_pretrained(tmp_path)
    change_json(tmp_path / "config.json", id2label=names, label2id=None)
    if "classes" in expected:
        with pytest.raises(ConversionError, match=expected):
            convert(tmp_path)
        return
    model, _ = convert(tmp_path)
    assert len(model.config.id2label) == 11
    assert model.config.id2label[0] == expected
    assert all(model.config.label2id[name] == index for index, name in model.config.id2label.items())


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [None, "auto", torch.float32, "bfloat16"])
def test_dtypes_of_a_folder_of_transformers(tmp_path, dtype, stored):
    """As in transformers, but without a dtype it is float32, in which a conversion computes like its source."""
    their_model("ViTForImageClassification").to(stored).save_pretrained(tmp_path)
    model, _ = hf_vit.load(tmp_path, **({} if dtype is None else {"dtype": dtype}))
    if dtype is not None:
        theirs = transformers.ViTForImageClassification.from_pretrained(tmp_path, dtype=dtype)
        assert model.dtype == theirs.dtype
        assert torch.equal(model.vit.layernorm.weight, theirs.vit.layernorm.weight)
    assert model.dtype == {None: torch.float32, "auto": stored, "bfloat16": torch.bfloat16}.get(dtype, dtype)


@pytest.mark.parametrize("options", [{}, {"max_shard_size": "4KB"}])
@pytest.mark.parametrize("is_alone", [True, False])
def test_a_variant_of_the_weights(tmp_path, options, is_alone):
    """In folders of hf_vit and of transformers, also in shards and without other weights."""
    theirs = their_model("ViTForImageClassification")
    theirs.save_pretrained(tmp_path / "theirs", variant="fp16", **options)
    ours, _ = convert(tmp_path / "theirs", variant="fp16")
    ours.save_pretrained(tmp_path / "ours", variant="fp16", **options)
    for folder, model in (("theirs", theirs), ("ours", ours)):
        if not is_alone and not options:  # save_pretrained deletes other shards
            randomize(copy.deepcopy(model), mean=1).save_pretrained(tmp_path / folder)
        assert_close(run(load_model(tmp_path / folder, variant="fp16"), PIXELS).logits, run(theirs, PIXELS).logits)
        with pytest.raises((ValueError, OSError), match="fp8"):
            hf_vit.load(tmp_path / folder, variant="fp8")
    assert main(["convert", str(tmp_path / "theirs"), str(tmp_path / "out"), "--variant", "fp16"]) == 0
    assert_close(run(load_model(tmp_path / "out"), PIXELS).logits, run(theirs, PIXELS).logits)


SMALL = {**SIZES, "num_hidden_layers": 2, "image_size": 20, "patch_size": 4}
SMALL_BIT = {"embedding_size": 32, "hidden_sizes": [128, 256], "depths": [1, 2]}
SMALL_MAE = {"decoder_hidden_size": 8, "decoder_num_attention_heads": 2, "decoder_num_hidden_layers": 1}
# class of transformers -> fields of its configuration; None: the model type is refused by name
TYPES = {
    "ViTForImageClassification": {"model_type": "vit"},
    "ViTModel": {"model_type": "vit"},
    "ViTMAEModel": {"model_type": "vit_mae", "mask_ratio": 0.0},
    "SiglipVisionModel": {"model_type": "siglip_vision_model"},
    "BitForImageClassification": {"model_type": "bit"},
    "BitModel": {"model_type": "bit", "layer_type": "bottleneck", **SAME_PADDING},
    **dict.fromkeys(("DeiTModel", "DeiTForImageClassification", "DeiTForImageClassificationWithTeacher")),
    **dict.fromkeys(("Dinov2Model", "Dinov2ForImageClassification", "Dinov2WithRegistersModel")),
    **dict.fromkeys(("SiglipModel", "SiglipForImageClassification", "Siglip2VisionModel")),
    **dict.fromkeys(("BeitModel", "CLIPVisionModel", "IJepaModel", "VivitModel", "SwinModel", "ViTMSNModel")),
}


@pytest.mark.parametrize("name", TYPES)
def test_a_model_that_transformers_saved_computes_the_same_or_is_refused(tmp_path, name):
    """Each with small random weights; transformers' `vit-hybrid` of version 4 is in `test_hybrids_convert`."""
    model_class = getattr(transformers, name)
    fields = TYPES[name]
    if fields is None:
        config = model_class.config_class()
        config.architectures = [name]
        config.save_pretrained(tmp_path)
        save_file({"weight": torch.ones(1)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ConversionError, match=f"type {config.model_type}"):
            hf_vit.load(tmp_path)
        return
    sizes = SMALL_BIT if fields["model_type"] == "bit" else SMALL
    if fields["model_type"] == "vit_mae":
        sizes = SMALL | SMALL_MAE
    theirs = randomize(model_class(model_class.config_class(**sizes, **fields)), std=0.1)
    if name == "ViTMAEModel":  # fixed sines
        theirs.embeddings.position_embeddings.data = model_class(theirs.config).embeddings.position_embeddings.data
    theirs.save_pretrained(tmp_path)
    ours = load_model(tmp_path)
    pixel_values = torch.randn(2, 3, 64, 96) if sizes is SMALL_BIT else PIXELS
    if name == "ViTMAEModel":  # which would shuffle the patches
        expected = run(theirs, pixel_values, noise=torch.arange(25.0).expand(3, -1)).last_hidden_state
        assert_close(run(ours, pixel_values).last_hidden_state, expected)
        return
    output = run(theirs, pixel_values)
    for kind in ("logits", "last_hidden_state", "pooler_output"):
        if kind in output:
            expected = output[kind]
            torch.testing.assert_close(
                run(ours, pixel_values)[kind].flatten(1), expected.flatten(1), rtol=1e-5, atol=1e-5
            )
