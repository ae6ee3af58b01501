"""Features: layers, cache on disk, and errors."""

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from PIL import Image

from hf_vit.evaluation import features as module
from hf_vit.evaluation.features import Extractor, open_train_and_test
from hf_vit.models.configuration_hf_bit import HfBiTConfig
from hf_vit.models.image_processing_hf_vit import HfViTImageProcessor
from hf_vit.models.modeling_hf_bit import HfBiTForImageClassification
from hf_vit.models.modeling_hf_vit import HfViTForImageClassification, HfViTModel
from hf_vit.settings.fields import EvaluateSettings
from hf_vit.settings.options import parse_settings

from ..processes import arguments
from ..tiny_models import save_tiny


def extractor_of(model, dataset, **changes) -> Extractor:
    changes = {"num_workers": 0, "eval_batch_size": 5, "protocol": "knn", **changes}
    settings = parse_settings(EvaluateSettings, arguments(model=model, dataset=dataset, **changes))
    return Extractor(settings, Accelerator())


def extract(extractor, **options):
    return extractor.extract(open_train_and_test(extractor.settings)[1], "test", **options)


def test_features_equal_the_input_of_the_head(tiny, colors):
    found = extract(extractor_of(tiny, colors))
    assert found.values.shape == (14, 10)
    assert found.labels.tolist() == [0] * 5 + [1] * 5 + [2] * 4
    assert (found.index.tolist(), found.skipped) == ([*range(13), 14], 1)
    classifier = HfViTForImageClassification.from_pretrained(tiny).eval()
    image = Image.open(colors / "test" / "green" / "1.png")
    pixels = HfViTImageProcessor.from_pretrained(tiny)(image, return_tensors="pt")["pixel_values"]
    with torch.inference_mode():
        torch.testing.assert_close(classifier.classifier(found.values[6]), classifier(pixels).logits[0])


@pytest.mark.parametrize("config", [{}, {"pooling": "mean", "norm_after_pooling": True}, {"pooling": "map"}], ids=str)
def test_layers_and_tokens(config, colors, tmp_path):
    folder = save_tiny(tmp_path / "model", **config)
    model = HfViTModel.from_pretrained(folder).eval()
    processor = HfViTImageProcessor.from_pretrained(folder)
    pixels = processor(Image.open(colors / "test" / "blue" / "0.png"), return_tensors="pt")["pixel_values"]
    with torch.inference_mode():
        outputs = model(pixels, output_hidden_states=True)
    first = model.config.num_prefix_tokens

    def found(**changes):
        return extract(extractor_of(folder, colors, **changes)).values[0]

    with torch.inference_mode():
        torch.testing.assert_close(found(feature_layer=3), outputs.pooler_output[0])
        torch.testing.assert_close(found(features="patch_mean"), outputs.last_hidden_state[0, first:].mean(dim=0))
        tokens = model.layernorm(outputs.hidden_states[2])[0]
        torch.testing.assert_close(found(features="patch_mean", feature_layer=2), tokens[first:].mean(dim=0))
        if first:
            torch.testing.assert_close(found(features="class_token", feature_layer=2), tokens[0])
        else:
            with pytest.raises(ValueError, match="--features"):
                found(features="class_token")


def test_the_native_preset_ignores_padding(tiny, colors):
    mean = extract(extractor_of(tiny, colors, preset="native", features="patch_mean")).values
    pooled = extract(extractor_of(tiny, colors, preset="native")).values
    model, processor = HfViTModel.from_pretrained(tiny).eval(), HfViTImageProcessor.from_pretrained(tiny)
    processor.update(preset="native", patch_size=[4, 4])
    with torch.inference_mode():
        batch = processor(Image.open(colors / "test" / "blue" / "0.png"), return_tensors="pt")
        outputs = model(**batch)
    real = batch["pixel_attention_mask"][0].bool()
    torch.testing.assert_close(pooled[0], outputs.pooler_output[0])
    torch.testing.assert_close(mean[0], outputs.last_hidden_state[0, 1:][real].mean(dim=0))


def test_images_are_computed_once_and_kept(tiny, colors, tmp_path, monkeypatch):
    computed = []
    compute = Extractor.compute
    monkeypatch.setattr(
        Extractor, "compute", lambda self, split, numbers: computed.extend(numbers) or compute(self, split, numbers)
    )
    monkeypatch.setattr(module, "_PIECE", 4)
    some = extract(extractor_of(tiny, colors, output_dir=tmp_path), wanted=np.array([9, 2, 13, 2]))
    assert some.index.tolist() == [2, 9]  # 13 is broken
    everything = extract(extractor_of(tiny, colors, output_dir=tmp_path))
    again = extract(extractor_of(tiny, colors, output_dir=tmp_path))
    assert sorted(computed) == list(range(15))
    assert torch.equal(everything.values, again.values)
    assert torch.equal(everything.values[[2, 9]], some.values)
    assert (again.index.tolist(), again.skipped) == ([*range(13), 14], 1)
    extract(extractor_of(tiny, colors, output_dir=tmp_path, features="class_token"))
    assert len(computed) == 30
    extract(extractor_of(tiny, colors, output_dir=tmp_path, overwrite="true"))
    assert len(computed) == 45


def test_computed_features_are_kept_when_the_run_stops(tiny, colors, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_PIECE", 4)
    compute, calls = Extractor.compute, []

    def stop_at_the_third(self, split, numbers):
        calls.append(list(numbers))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return compute(self, split, numbers)

    monkeypatch.setattr(Extractor, "compute", stop_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        extract(extractor_of(tiny, colors, output_dir=tmp_path))
    assert len(extract(extractor_of(tiny, colors, output_dir=tmp_path))) == 14
    assert calls[3:] == [[8, 9, 10, 11], [12, 13, 14]]


def test_not_finite_features_are_an_error(tiny, colors, tmp_path):
    model = HfViTForImageClassification.from_pretrained(tiny)
    torch.nn.init.constant_(model.vit.layers[1].mlp.fc1.bias, torch.nan)
    model.save_pretrained(tmp_path)
    HfViTImageProcessor.from_pretrained(tiny).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"\b0$"):
        extract(extractor_of(tmp_path, colors))


def test_missing_layers_and_streaming_are_refused(tiny, colors):
    with pytest.raises(ValueError, match="--feature-layer"):
        extractor_of(tiny, colors, feature_layer=4)
    with pytest.raises(ValueError, match="streaming"):
        extractor_of(tiny, colors, streaming="true")


def test_a_resnet_has_one_kind_of_features(colors, tmp_path):
    config = HfBiTConfig(depths=[1, 1], embedding_size=32, image_size=[20, 36], num_labels=11)
    HfBiTForImageClassification(config).save_pretrained(tmp_path)
    HfViTImageProcessor(size={"height": 20, "width": 36}).save_pretrained(tmp_path)
    assert extract(extractor_of(tmp_path, colors)).values.shape == (14, config.hidden_size)
    with pytest.raises(ValueError, match="--features"):
        extractor_of(tmp_path, colors, features="patch_mean")
    with pytest.raises(ValueError, match="ResNet"):
        extractor_of(tmp_path, colors, preset="native")


def test_a_model_without_a_head_has_features(tiny, colors, tmp_path):
    HfViTModel.from_pretrained(tiny).save_pretrained(tmp_path)
    HfViTImageProcessor.from_pretrained(tiny).save_pretrained(tmp_path)
    bare, whole = (extract(extractor_of(folder, colors)).values for folder in (tmp_path, tiny))
    assert torch.equal(bare, whole)
