"""The real ViT-Ti/16 on real photographs: statements of the paper about trained models."""

import zipfile

import numpy as np
import pytest
from transformers import AutoImageProcessor

from hf_vit import analysis
from hf_vit.conversion import convert

from ..tiny_models import load_model


@pytest.fixture(scope="module")
def folder(shared, tmp_path_factory):
    path = tmp_path_factory.mktemp("real") / "ti16"
    convert(shared / "weights/Ti_16-imagenet2012-res_224.npz", labels="imagenet1k", read_weights=False).save(path)
    return path


@pytest.fixture(scope="module")
def model(folder):
    return load_model(folder)


@pytest.fixture(scope="module")
def pixel_values(shared, folder, tmp_path_factory):
    """Every tenth photograph of the ImageNet sample, and the two cats."""
    path = tmp_path_factory.mktemp("imagenet")
    with zipfile.ZipFile(shared / "data/imagenet_sample/images.zip") as archive:
        names = sorted(name for name in archive.namelist() if name.lower().endswith((".jpg", ".jpeg")))[::10]
        archive.extractall(path, names)
    processor = AutoImageProcessor.from_pretrained(folder)
    files = [shared / "data/coco/000000039769.png", *(path / name for name in names)]
    return processor([str(file) for file in files], return_tensors="pt")["pixel_values"]


def test_distance_grows_with_depth(model, pixel_values):
    """Section 4.5: attention distance increases with depth; some heads look far already in the lowest layers."""
    distances = analysis.attention_distance(model, pixel_values)
    assert distances.shape == (12, 3)
    means = distances.mean(axis=1)
    assert np.corrcoef(np.arange(12), means)[0, 1] > 0.8
    assert means[-4:].mean() > 2 * means[:4].mean()
    assert distances[:2].max() > 2 * distances[:2].min()


def test_embeddings_of_near_positions_are_similar(model):
    """Section 4.5: closer patches tend to have more similar position embeddings."""
    similarity = analysis.position_similarity(model)
    rows, columns = np.indices((14, 14)).reshape(2, -1)
    distances = np.hypot(rows[:, None] - rows, columns[:, None] - columns)
    apart = distances > 0
    assert np.corrcoef(distances[apart], similarity.reshape(196, 196)[apart])[0, 1] < -0.3
    neighbors, far = (similarity.reshape(196, 196)[choice].mean() for choice in (distances == 1, distances > 7))
    assert neighbors > far + 0.4


def test_rollout_finds_the_remote_controls_and_cats(model, pixel_values):
    """The cats lie above the plain blanket: the attention of the image's lower middle is less than the mean."""
    rollout = analysis.attention_rollout(model, pixel_values[:1])[0]
    blanket = rollout[9:13, 5:8]
    assert blanket.mean() < 0.9 * rollout.mean()
    assert rollout[2:5, 1:5].mean() > 1.1 * rollout.mean()  # the left remote control and a cat's head


def test_filters_are_orthonormal(model):
    filters = analysis.embedding_filters(model).reshape(28, -1)
    np.testing.assert_allclose(filters @ filters.T, np.eye(28), atol=1e-9)
