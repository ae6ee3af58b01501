"""Nearest neighbors, compared with a vote by hand."""

import math

import pytest
import torch

from hf_vit.evaluation import features
from hf_vit.evaluation.features import vote
from hf_vit.scripts.evaluate import evaluate

from ..processes import arguments


def test_votes_by_hand():
    """Cosines of a query with five keys: 1, 0.8, 0.6, 0, -1; of classes 0, 1, 1, 2, 2."""
    keys = torch.tensor([[1.0, 0], [0.8, 0.6], [0.6, -0.8], [0, 1], [-1, 0]])
    votes = vote(torch.tensor([[1.0, 0]]), keys, torch.tensor([0, 1, 1, 2, 2]), 4, count=3, temperature=0.5)
    expected = [math.exp(2), math.exp(1.6) + math.exp(1.2), 0, 0]
    torch.testing.assert_close(votes / votes.sum(), torch.tensor([expected]) / sum(expected))
    alone = vote(torch.tensor([[1.0, 0]]), keys, torch.tensor([0, 1, 1, 2, 2]), 4, count=1, temperature=0.5)
    assert alone.argmax() == 0
    assert votes.argmax() == 1


def test_nearest_neighbors_protocol(tiny, colors, monkeypatch):
    monkeypatch.setattr(features, "_QUERIES", 4)
    settings = {"model": tiny, "dataset": colors, "num_workers": 0, "eval_batch_size": 5, "protocol": "knn"}
    results = evaluate(arguments(**settings, neighbors="1,7"))
    assert [row["neighbors"] for row in results["knn"]] == [1, 7]
    assert all(row["accuracy"] > 0.9 for row in results["knn"])
    assert all(row["top5_accuracy"] == 1 for row in results["knn"])
    with pytest.raises(ValueError, match="25"):
        evaluate(arguments(**settings, neighbors=25))
