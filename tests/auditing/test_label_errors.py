"""Probable label errors, judged by labels that were flipped on purpose."""

import numpy as np
import torch

from hf_vit.auditing.audit import find_label_errors


def flipped_clusters(images=300, classes=4, noise=1.2, share=0.05):
    """Features in clusters, and labels of which some are wrong."""
    rng = np.random.default_rng(0)
    labels = np.arange(images) % classes
    features = rng.normal(size=(classes, 11))[labels] * 2 + noise * rng.normal(size=(images, 11))
    flipped = rng.permutation(images)[: round(images * share)]
    labels[flipped] = (labels[flipped] + rng.integers(1, classes, len(flipped))) % classes
    return torch.from_numpy(features).float(), torch.from_numpy(labels), set(flipped.tolist())


def test_flipped_labels_are_found():
    features, labels, flipped = flipped_clusters()
    errors, probabilities = find_label_errors(features, labels, 4)
    found = set(errors.tolist())
    assert len(found & flipped) >= 0.9 * len(flipped)
    assert len(found & flipped) >= 0.8 * len(found)
    np.testing.assert_allclose(probabilities.sum(axis=1), 1, rtol=1e-5)


def test_the_only_image_of_a_class_is_no_error():
    features, labels, _ = flipped_clusters(share=0)
    labels[7] = 4
    assert 7 not in find_label_errors(features, labels, 5)[0]
