"""Features of images, and what is learned from them: few shots, a linear probe and nearest neighbors.

NumPy's solver, scikit-learn's logistic regression and a vote by hand judge the last three.
"""

import json
import math
import os
import shutil
import zipfile

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from PIL import Image
from sklearn.linear_model import LogisticRegression as Theirs

from hf_vit.cli import main
from hf_vit.conversion import convert
from hf_vit.evaluation import features as module
from hf_vit.evaluation.features import Extractor, open_train_and_test
from hf_vit.models.configuration_hf_bit import HfBiTConfig
from hf_vit.models.image_processing_hf_vit import HfViTImageProcessor
from hf_vit.models.modeling_hf_bit import HfBiTForImageClassification
from hf_vit.models.modeling_hf_vit_variants import HfViTForImageClassification, HfViTModel
from hf_vit.settings.fields import EvaluateSettings
from hf_vit.settings.options import parse_settings

from ..commands import evaluate
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


def test_features_of_a_folder_of_parts_are_not_computed_again(tiny, colors, tmp_path, monkeypatch):
    """Only those of a file that has changed since."""
    colors = shutil.copytree(colors, tmp_path / "colors")
    assert main(["embed", str(tiny), str(colors), "--output", f"{tmp_path}/parts/", "--unit-size", "8"]) == 0
    expected = extract(extractor_of(tiny, colors))
    computed = []
    compute = Extractor.compute
    monkeypatch.setattr(Extractor, "compute", lambda *given: computed.append(given[2].tolist()) or compute(*given))
    extractor = extractor_of(tiny, colors, embeddings=tmp_path / "parts")
    found = extract(extractor)
    assert computed == [[13]]  # the unreadable one
    torch.testing.assert_close(found.values, expected.values)
    assert found.labels.tolist() == expected.labels.tolist()
    assert (found.index.tolist(), found.skipped) == (expected.index.tolist(), 1)
    Image.new("RGB", (30, 30), "yellow").save(colors / "test" / "green" / "1.png")
    os.utime(colors / "test" / "green" / "1.png", (2**31, 2**31))
    changed = extract(extractor)
    assert computed[1] == [6, 13]
    assert (changed.values != found.values).any(dim=1).nonzero().flatten().tolist() == [6]


def test_features_of_another_model_are_refused(tiny, colors, tmp_path):
    other = save_tiny(tmp_path / "other", patch_size=4, representation_size=10, layer_norm_eps=1e-3)
    assert main(["embed", str(other), str(colors), "--output", f"{tmp_path}/parts/"]) == 0
    with pytest.raises(ValueError, match="another model"):
        extract(extractor_of(tiny, colors, embeddings=tmp_path / "parts"))


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
    """Also those that were computed before a run is stopped."""
    compute, computed = Extractor.compute, []

    def stop_at_the_third(self, split, numbers):
        computed.append(list(numbers))
        if len(computed) == 3:
            raise KeyboardInterrupt
        return compute(self, split, numbers)

    monkeypatch.setattr(Extractor, "compute", stop_at_the_third)
    monkeypatch.setattr(module, "_PIECE", 4)
    some = extract(extractor_of(tiny, colors, output_dir=tmp_path), wanted=np.array([9, 2, 13, 2]))
    assert some.index.tolist() == [2, 9]  # 13 is broken
    with pytest.raises(KeyboardInterrupt):
        extract(extractor_of(tiny, colors, output_dir=tmp_path))
    everything = extract(extractor_of(tiny, colors, output_dir=tmp_path))
    again = extract(extractor_of(tiny, colors, output_dir=tmp_path))
    assert computed == [[2, 9, 13], [0, 1, 3, 4], [5, 6, 7, 8], [5, 6, 7, 8], [10, 11, 12, 14]]
    assert torch.equal(everything.values, again.values)
    assert torch.equal(everything.values[[2, 9]], some.values)
    assert (again.index.tolist(), again.skipped) == ([*range(13), 14], 1)
    for changes in ({"features": "class_token"}, {"overwrite": "true"}):
        computed.clear()
        extractor = extractor_of(tiny, colors, output_dir=tmp_path, **changes)
        monkeypatch.setattr(Extractor, "compute", lambda *given: computed.append(list(given[-1])) or compute(*given))
        extract(extractor)
        assert [number for piece in computed for number in piece] == list(range(15))


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


def measure(model, dataset, protocol, **changes) -> dict:
    changes = {"num_workers": 0, "eval_batch_size": 5, **changes}
    return evaluate(arguments(model=model, dataset=dataset, protocol=protocol, **changes))


# Few shots


def test_the_draw_equals_big_vision():
    """`rng = default_rng(seed)`, then for each class in turn `rng.permutation` of its images."""
    labels = np.array([1, 0, 1, 1, 0, 2, 2, 1])
    rng = np.random.default_rng(2)
    expected = [rng.permutation([1, 4]), rng.permutation([0, 2, 3, 7]), rng.permutation([5, 6])]
    for found, wanted in zip(module.draw(labels, 3, seed=2), expected, strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_few_shot_protocol(tiny, colors, tmp_path):
    own = {"shots": "2,6", "l2_reg": "[1, 1024]", "seeds": 3, "output_dir": tmp_path}
    results = measure(tiny, colors, "few_shot", **own)
    assert [(row["shots"], row["l2_reg"]) for row in results["few_shot"]] == [(2, 1), (2, 1024), (6, 1), (6, 1024)]
    assert (results["samples"], results["skipped"]) == (14, 1)
    for row in results["few_shot"]:
        assert row["accuracy"] == pytest.approx(np.mean(row["accuracy_of_seeds"]))
        assert row["spread"] == [min(row["accuracy_of_seeds"]), max(row["accuracy_of_seeds"])]
        assert row["accuracy"] > 0.9
    assert json.loads((tmp_path / "few_shot.json").read_text()) == results


def test_too_few_images_are_refused(tiny, colors):
    for shots, name in (("[1, 9]", "blue"), ("0", "shots")):
        with pytest.raises(ValueError, match=name):
            measure(tiny, colors, "few_shot", shots=shots)


@pytest.mark.slow
def test_flowers_with_the_real_tiny_vit(shared, tmp_path):
    """Independent code: 1 shot 93.5%, 5 shots 98.5%, 10 shots 98.9%, 25 shots 99.3%, means of 3 seeds."""
    convert(shared / "weights" / "Ti_16-imagenet2012-res_224.npz", read_weights=False).save(tmp_path / "ti16")
    with zipfile.ZipFile(shared / "data" / "flowers12" / "flowers12.zip") as archive:
        archive.extractall(tmp_path / "flowers")
    chosen = {"features": "class_token", "preset": "transformers", "shots": "1,5"}
    results = measure(tmp_path / "ti16", tmp_path / "flowers", "few_shot", **chosen)
    for row, expected in zip(results["few_shot"], (0.935, 0.985), strict=True):
        assert row["spread"][0] <= expected + 0.001
        assert expected - 0.001 <= row["spread"][1]
        assert row["accuracy"] == pytest.approx(expected, abs=0.006)  # an image of 180


# Linear probe


def clusters(images: int, classes: int, features: int, noise: float):
    torch.manual_seed(0)
    labels = torch.arange(images) % classes
    return torch.randn(classes, features)[labels] + noise * torch.randn(images, features), labels


@pytest.mark.parametrize("l2", [0.003, 0.3])
def test_the_optimum_equals_scikit_learn(l2):
    values, labels = clusters(83, 4, 11, noise=1.5)
    values = values.double() * 3 + 2
    ours = module.LogisticRegression(values, 4)
    ours.fit(values, labels, l2)
    whitened = ((values - values.mean(dim=0)) / values.std(dim=0, correction=0)).numpy()
    theirs = Theirs(C=1 / (83 * l2), tol=1e-10, max_iter=5000).fit(whitened, labels.numpy())
    probabilities = ours.logits(values).softmax(dim=1).numpy()
    np.testing.assert_allclose(probabilities, theirs.predict_proba(whitened), atol=1e-4)
    np.testing.assert_allclose(ours.weights.numpy(), theirs.coef_.T, atol=1e-4)


def test_regularization_is_chosen_on_held_out_images():
    values, labels = clusters(200, 3, 60, noise=4)
    held_out = module.hold_out(200, 0.25, seed=0)
    assert held_out.sum() == 50
    accuracies = module.choose(values, labels, held_out, [1e-6, 0.3, 1e4], 3)
    assert list(accuracies) == [1e4, 0.3, 1e-6]
    assert accuracies[0.3] >= max(accuracies[1e-6], accuracies[1e4])
    assert torch.equal(held_out, module.hold_out(200, 0.25, seed=0))
    assert (module.hold_out(2, 0.01, 0).sum(), module.hold_out(2, 0.9, 0).sum()) == (1, 1)
    with pytest.raises(ValueError, match=r" 1$"):
        module.hold_out(1, 0.5, 0)


def test_linear_probe_protocol(tiny, colors):
    results = measure(tiny, colors, "linear_probe", probe_l2="[0.01, 1]")
    assert results["accuracy"] > 0.9
    assert results["held_out_accuracy"].keys() == {"0.01", "1.0"}
    assert results["l2"] in (0.01, 1)
    assert (results["samples"], results["skipped"]) == (14, 1)


# Nearest neighbors


def test_votes_by_hand():
    """Cosines of a query with five keys: 1, 0.8, 0.6, 0, -1; of classes 0, 1, 1, 2, 2."""
    keys = torch.tensor([[1.0, 0], [0.8, 0.6], [0.6, -0.8], [0, 1], [-1, 0]])
    votes = module.vote(torch.tensor([[1.0, 0]]), keys, torch.tensor([0, 1, 1, 2, 2]), 4, count=3, temperature=0.5)
    expected = [math.exp(2), math.exp(1.6) + math.exp(1.2), 0, 0]
    torch.testing.assert_close(votes / votes.sum(), torch.tensor([expected]) / sum(expected))
    alone = module.vote(torch.tensor([[1.0, 0]]), keys, torch.tensor([0, 1, 1, 2, 2]), 4, count=1, temperature=0.5)
    assert alone.argmax() == 0
    assert votes.argmax() == 1


def test_nearest_neighbors_protocol(tiny, colors, monkeypatch):
    monkeypatch.setattr(module, "_QUERIES", 4)
    results = measure(tiny, colors, "knn", neighbors="1,7")
    assert [row["neighbors"] for row in results["knn"]] == [1, 7]
    assert all(row["accuracy"] > 0.9 for row in results["knn"])
    assert all(row["top5_accuracy"] == 1 for row in results["knn"])
    with pytest.raises(ValueError, match="25"):
        measure(tiny, colors, "knn", neighbors=25)
