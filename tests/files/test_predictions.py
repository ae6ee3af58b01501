"""Classes that are predicted by their scores, instead of the first ones."""

import io

import pytest
import torch

import hf_vit
from hf_vit import HfViTConfig, HfViTForImageClassification, HfViTImageProcessor
from hf_vit.data.issues import Issue, read_issues, write_issues
from hf_vit.files.predictions import Table, distances_to_classes, lowest_scores, most_likely

SHAPE = {"hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 20}
SHAPE |= {"image_size": 8, "patch_size": 4, "num_labels": 3}


def test_classes_reach_their_own_thresholds():
    config = HfViTConfig(**SHAPE, problem_type="multi_label_classification", label_thresholds=[0.2, 0.7, 0.4])
    logits = torch.tensor([[0.3, 0.1, 0.5], [0.1, 0.8, 0.3], [0.1, 0.1, 0.1]]).logit()
    chosen = most_likely(logits, config, lowest=lowest_scores(config, "auto"))
    assert [[prediction.label for prediction in image] for image in chosen] == [["LABEL_2", "LABEL_0"], ["LABEL_1"], []]
    chosen = most_likely(logits, config, lowest=lowest_scores(config, 0.25))
    assert [len(image) for image in chosen] == [2, 2, 0]
    config.label_thresholds = [0.9]  # of another head
    assert lowest_scores(config, "auto") == [0.5] * 3


def test_sets_of_a_coverage():
    config = HfViTConfig(**SHAPE, coverage_thresholds={"0.9": 0.3, "0.95": 0.0})
    pair = HfViTForImageClassification(config).eval(), HfViTImageProcessor.for_model(config)
    image = torch.zeros(3, 8, 8, dtype=torch.uint8)  # the head is zero: each class has 1/3
    assert len(hf_vit.predict(pair, image, top_k=1, coverage=0.9)[0]) == 3
    assert hf_vit.predict(pair, [image], threshold=0.4) == [[]]
    with pytest.raises(ValueError, match=r"0\.9, 0\.95"):
        hf_vit.predict(pair, [image], coverage=0.8)
    with pytest.raises(ValueError, match="coverage"):
        lowest_scores(config, 0.5, 0.9)
    with pytest.raises(ValueError, match="calibrate"):
        lowest_scores(HfViTConfig(**SHAPE), coverage=0.9)


def test_an_image_far_from_all_classes_has_none():
    config = HfViTConfig(**SHAPE, rejection_thresholds=[1.0, -2.0, 3.0])
    logits = torch.tensor([[1.5, 0.0, 0.0], [0.5, 0.0, 0.0], [-3.0, -1.0, -3.0], [0.0, 0.0, 2.5]])
    torch.testing.assert_close(distances_to_classes(logits, config), torch.tensor([-0.5, 0.5, -1.0, 0.5]))
    chosen = [[one.label for one in image] for image in most_likely(logits, config, top_k=1, reject=True)]
    assert chosen == [["LABEL_0"], [], ["LABEL_1"], []]
    pair = HfViTForImageClassification(config).eval(), HfViTImageProcessor.for_model(config)
    image = torch.zeros(3, 8, 8, dtype=torch.uint8)  # the head is zero, and so are its logits
    assert hf_vit.predict(pair, [image], reject=True) == [[]]
    with pytest.raises(ValueError, match="calibrate"):
        most_likely(logits, HfViTConfig(**SHAPE), reject=True)


def test_cells_are_neither_formulas_nor_controls(tmp_path):
    file = io.StringIO()
    Table(file, ["=1"]).extend([["+A1", -3.5], ["-2.5e-05", "@x"], ["\x1b[31m", "a-b"]])
    assert file.getvalue() == "'=1\n'+A1,-3.5\n-2.5e-05,'@x\n\\x1b[31m,a-b\n"
    write_issues([Issue("=a.png", "label", 0.5, "-cat")], tmp_path / "issues.csv")
    assert [(row["image"], row["label"]) for row in read_issues(str(tmp_path / "issues.csv"))] == [("=a.png", "-cat")]
