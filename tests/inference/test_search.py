"""Exact search, against all cosines by NumPy in float64."""

import numpy as np
import pytest
from sklearn.datasets import load_sample_images

from hf_vit.inference.search import search


def all_cosines(queries, features):
    """(queries, features) by the definition; 0 for a feature vector of zeros."""
    products = queries.astype(np.float64) @ features.astype(np.float64).T
    lengths = [np.linalg.norm(vectors.astype(np.float64), axis=1) for vectors in (queries, features)]
    lengths = np.outer(*lengths)
    return np.divide(products, lengths, out=np.zeros(lengths.shape), where=lengths > 0)


def test_search_is_exact(monkeypatch):
    """Equal rows keep their order."""
    monkeypatch.setattr("hf_vit.inference.search.ROWS_AT_ONCE", 17)
    rng = np.random.default_rng(0)
    features = rng.normal(size=(103, 7)).astype(np.float32)
    features[50], features[90], features[3] = features[20], features[20], 0
    queries = np.concatenate([rng.normal(size=(4, 7)), features[20:21]])
    expected = all_cosines(queries, features)
    for whole_or_chunks in (features, iter(np.split(features, [5, 60]))):
        rows, cosines = search(whole_or_chunks, queries, 11)
        np.testing.assert_allclose(cosines, -np.sort(-expected, axis=1)[:, :11], atol=1e-12)
        np.testing.assert_allclose(np.take_along_axis(expected, rows, 1), cosines, atol=1e-12)
        assert rows[4, :3].tolist() == [20, 50, 90]
    assert search(features[:4], queries, 11)[0].shape == (5, 4)
    with pytest.raises(ValueError, match=r"7 .* 6"):
        search(features, queries[:, :6])
    with pytest.raises(ValueError, match="top_k"):
        search(features, queries, 0)


def test_patches_of_photographs(monkeypatch):
    """768 values of 16 x 16 pixels, the input of the patch embedding: many of the sky have a cosine near 1."""
    monkeypatch.setattr("hf_vit.inference.search.ROWS_AT_ONCE", 300)
    monkeypatch.setattr("hf_vit.inference.search.QUERIES_AT_ONCE", 150)
    patches = []
    for photograph in load_sample_images().images:  # (427, 640, 3)
        cut = photograph[:416].reshape(26, 16, 40, 16, 3)
        patches.append(cut.transpose(0, 2, 1, 3, 4).reshape(-1, 768))
    features = np.concatenate(patches).astype(np.float32) / 127.5 - 1
    queries = features[::7]
    rows, cosines = search(features, queries, 20)
    expected = all_cosines(queries, features)
    np.testing.assert_allclose(cosines, -np.sort(-expected, axis=1)[:, :20], atol=1e-12)
    np.testing.assert_allclose(np.take_along_axis(expected, rows, 1), cosines, atol=1e-12)
    assert all(len(set(found)) == 20 for found in rows.tolist())
