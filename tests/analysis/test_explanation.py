"""Relevance by name and index, and areas of deletion and insertion for a model whose answer is known."""

import json

import numpy as np
import pytest
import torch

from hf_vit.analysis import faithfulness, relevance
from hf_vit.models.modeling_hf_vit_variants import HfViTModel
from hf_vit.models.relevance import class_relevance

from ..tiny_models import images, tiny, tiny_bit
from .test_inspection import inspect


def test_targets_are_names_indices_or_predictions():
    model = tiny()
    pixel_values = images(model, batch=5)
    expected = class_relevance(model, pixel_values, torch.full((5,), 3)).numpy()
    for target in (3, "LABEL_3"):
        np.testing.assert_allclose(relevance(model, pixel_values, target, batch_size=2), expected, rtol=1e-4, atol=1e-9)
    chosen = ["LABEL_3", 1, 3, "LABEL_10", 0]
    found = relevance(model, pixel_values, chosen, batch_size=2)
    np.testing.assert_allclose(found[[0, 2]], expected[[0, 2]], rtol=1e-4, atol=1e-9)
    with torch.inference_mode():
        predicted = model(pixel_values).logits.argmax(dim=1)
    own = class_relevance(model, pixel_values, predicted).numpy()
    np.testing.assert_allclose(relevance(model, pixel_values), own, rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize(("target", "named"), [("LABEL_33", "LABEL_3"), (11, "11"), (-1, "-1")])
def test_unknown_classes_are_refused(target, named):
    model = tiny()
    with pytest.raises(ValueError, match=named):
        relevance(model, images(model), target)


@pytest.mark.parametrize("model", [HfViTModel(tiny().config), tiny_bit()], ids=["encoder", "ResNet"])
def test_models_without_classes_or_attention_are_refused(model):
    for target in (None, 0):
        with pytest.raises(ValueError, match=type(model).__name__):
            relevance(model, torch.zeros(1, 3, *model.config.image_size), target)


def test_areas_of_a_model_that_sees_one_patch(monkeypatch):
    """If the patch that counts is the first of 45, deletion falls at once; if it is the last, at the end."""
    model = tiny(patch_size=4)
    grid = model.config.grid_size
    monkeypatch.setattr("hf_vit.analysis.explanation.attention_rollout", lambda *_: -first)
    monkeypatch.setattr("hf_vit.analysis.explanation.relevance", lambda *_: first)
    first = np.zeros((1, *grid))
    first[0, 1, 2] = 1

    def logits_of(pixel_values, **_):
        seen = pixel_values[:, :, 4:8, 8:12].abs().amax(dim=(1, 2, 3)) > 0
        logits = torch.where(seen, 50.0, -50.0)
        return type("Outputs", (), {"logits": torch.stack([-logits, logits], dim=1)})

    monkeypatch.setattr(model, "forward", logits_of)
    model.config.num_labels = 2
    areas = faithfulness(model, torch.ones(1, 3, 20, 36), target=1)
    step = 1 / 14
    assert areas["relevance"]["deletion"] == pytest.approx([step / 2])
    assert areas["relevance"]["insertion"] == pytest.approx([1 - step / 2])
    assert areas["rollout"]["deletion"] == pytest.approx([1 - step / 2])
    assert areas["rollout"]["insertion"] == pytest.approx([step / 2])


def test_inspect_draws_the_classes_that_are_named(tmp_path):
    report = inspect(tmp_path, tiny(), "--target", "LABEL_2", "LABEL_10")
    assert {"01-image.relevance-2.png", "01-image.relevance-10.png"} <= {file.name for file in report.iterdir()}
    areas = json.loads((report / "faithfulness.json").read_text())
    [of_image] = areas["images"].values()
    assert of_image.keys() == {"LABEL_2", "LABEL_10"}
    means = np.mean([of_image[name]["rollout"]["deletion"] for name in of_image])
    assert areas["mean"]["rollout"]["deletion"] == pytest.approx(means)
    inspect(tmp_path / "other", tiny(), "--target", "LABEL_99", status=2)
    assert not (tmp_path / "other" / "report").exists()
