"""Classes that are predicted by their scores, instead of the first ones."""

import io

import numpy as np
import pytest
import torch

import hf_vit
from hf_vit import HfViTConfig, HfViTForImageClassification, HfViTImageProcessor
from hf_vit.data.issues import Issue, read_issues, write_issues
from hf_vit.files.predictions import ClassRule, Prediction, Table, distances_to_classes
from hf_vit.models.scores import scores_of, stored_thresholds

SHAPE = {"hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 20}
SHAPE |= {"image_size": 8, "patch_size": 4, "num_labels": 3}


def classes_of(logits: torch.Tensor, config, **options) -> list[list[str]]:
    rule = ClassRule(config.id2label, stored_thresholds(config), **options)
    found = rule.classes(logits.numpy(), scores_of(logits, config).numpy())
    return [[prediction.label for prediction in image] for image in found]


def test_classes_reach_their_own_thresholds():
    config = HfViTConfig(**SHAPE, problem_type="multi_label_classification", label_thresholds=[0.2, 0.7, 0.4])
    logits = torch.tensor([[0.3, 0.1, 0.5], [0.1, 0.8, 0.3], [0.1, 0.1, 0.1]]).logit()
    assert classes_of(logits, config, threshold="auto") == [["LABEL_2", "LABEL_0"], ["LABEL_1"], []]
    assert [len(image) for image in classes_of(logits, config, threshold=0.25)] == [2, 2, 0]
    config.label_thresholds = [0.9]  # of another head: each class needs 0.5
    assert classes_of(logits, config, threshold="auto") == [["LABEL_2"], ["LABEL_1"], []]


def test_names_and_scores():
    logits = torch.tensor([[1.0, 3.0, 2.0], [0.0, 0.0, 9.0]])
    config = HfViTConfig(id2label={0: "tench", 1: "crane", 2: "crane"})
    rule = ClassRule(config.id2label, stored_thresholds(config), top_k=2)
    first, second = rule.classes(logits.numpy(), scores_of(logits, config).numpy())
    assert [one.label for one in first] == ["crane", "crane"]
    assert first[0].score == pytest.approx(0.66524, abs=1e-5)  # e^3 / (e + e^3 + e^2)
    assert second[0] == Prediction("crane", pytest.approx(0.99975, abs=1e-5))


def test_equal_scores_keep_the_order_of_the_classes():
    config = HfViTConfig(**SHAPE)
    assert classes_of(torch.tensor([[0.0, 1.0, 1.0]]), config) == [["LABEL_1", "LABEL_2", "LABEL_0"]]


def test_sets_of_a_coverage():
    config = HfViTConfig(**SHAPE, coverage_thresholds={"0.9": 0.3, "0.95": 0.0})
    pair = HfViTForImageClassification(config).eval(), HfViTImageProcessor.for_model(config)
    image = torch.zeros(3, 8, 8, dtype=torch.uint8)  # the head is zero: each class has 1/3
    assert len(hf_vit.predict(pair, image, top_k=1, coverage=0.9)[0]) == 3
    assert hf_vit.predict(pair, [image], threshold=0.4) == [[]]
    with pytest.raises(ValueError, match=r"0\.9, 0\.95"):
        hf_vit.predict(pair, [image], coverage=0.8)
    with pytest.raises(ValueError, match="coverage"):
        hf_vit.predict(pair, [image], threshold=0.5, coverage=0.9)
    with pytest.raises(ValueError, match="calibrate"):
        ClassRule({0: "cat"}, stored_thresholds(HfViTConfig(**SHAPE)), coverage=0.9)


def test_an_image_far_from_all_classes_has_none():
    config = HfViTConfig(**SHAPE, rejection_thresholds=[1.0, -2.0, 3.0])
    logits = torch.tensor([[1.5, 0.0, 0.0], [0.5, 0.0, 0.0], [-3.0, -1.0, -3.0], [0.0, 0.0, 2.5]])
    distances = distances_to_classes(logits.numpy(), config.rejection_thresholds)
    np.testing.assert_array_equal(distances, [-0.5, 0.5, -1.0, 0.5])
    assert classes_of(logits, config, top_k=1, reject=True) == [["LABEL_0"], [], ["LABEL_1"], []]
    pair = HfViTForImageClassification(config).eval(), HfViTImageProcessor.for_model(config)
    image = torch.zeros(3, 8, 8, dtype=torch.uint8)  # the head is zero, and so are its logits
    assert hf_vit.predict(pair, [image], reject=True) == [[]]
    with pytest.raises(ValueError, match="calibrate"):
        classes_of(logits, HfViTConfig(**SHAPE), reject=True)


def test_cells_are_neither_formulas_nor_controls(tmp_path):
    file = io.StringIO()
    Table(file, ["=1"]).extend([["+A1", -3.5], ["-2.5e-05", "@x"], ["\x1b[31m", "a-b"]])
    assert file.getvalue() == "'=1\n'+A1,-3.5\n-2.5e-05,'@x\n\\x1b[31m,a-b\n"
    write_issues([Issue("=a.png", "label", 0.5, "-cat")], tmp_path / "issues.csv")
    assert [(row["image"], row["label"]) for row in read_issues(str(tmp_path / "issues.csv"))] == [("=a.png", "-cat")]
