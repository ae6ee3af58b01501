"""Near duplicates: the same picture in every disguise, and no others."""

import io

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from hf_vit.auditing.audit import measure
from hf_vit.auditing.duplicates import find_near_duplicates, nearest_neighbors

from ..photographs import encode
from .conftest import draw

IMAGES = 30


def jpeg(image, quality=40):
    return Image.open(io.BytesIO(encode(image, "JPEG", quality=quality)))


DISGUISES = {
    "encoded": jpeg,
    "smaller": lambda image: image.resize((50, 43)),
    "larger": lambda image: image.resize((190, 160)),
    "squashed": lambda image: image.resize((64, 64)),
    "mirrored": ImageOps.mirror,
    "cropped": lambda image: image.crop((9, 3, 88, 71)),
    "all": lambda image: jpeg(ImageOps.mirror(image.crop((2, 10, 84, 80))).resize((61, 53)), quality=60),
}


def picture(image):
    return torch.from_numpy(np.array(measure(encode(image)).picture))


@pytest.fixture(scope="module")
def originals():
    rng = np.random.default_rng(0)
    images = [draw((90, 120, 30), rng) for _ in range(IMAGES)]
    return images, [picture(image) for image in images]


@pytest.mark.parametrize(("disguise", "in_blocks"), [*((name, False) for name in DISGUISES), ("all", True)])
def test_disguised_pictures_are_found_and_no_others(originals, disguise, in_blocks, monkeypatch):
    if in_blocks:  # as of more images than are compared at once
        monkeypatch.setattr("hf_vit.auditing.duplicates._ROWS_AT_ONCE", 11)
        monkeypatch.setattr("hf_vit.auditing.duplicates._KEYS_AT_ONCE", 13)
    rng = np.random.default_rng(0)
    images, pictures = originals
    copies = {IMAGES + number: number * 6 for number in range(5)}
    disguised = [picture(DISGUISES[disguise](images[row])) for row in copies.values()]
    features = torch.from_numpy(rng.normal(size=(IMAGES, 13))).float()
    features = torch.cat(
        [features, features[list(copies.values())] + 0.3 * torch.from_numpy(rng.normal(size=(5, 13))).float()]
    )
    found = find_near_duplicates(features, torch.stack([*pictures, *disguised]))
    assert set(found) == {(original, copy) for copy, original in copies.items()}
    assert min(found.values()) > 0.95


def test_blank_pictures_and_two_images():
    blank = torch.full((6, 64, 64), 200, dtype=torch.uint8)
    assert find_near_duplicates(torch.ones(6, 3), blank) == {}
    rng = np.random.default_rng(0)
    first, second = (picture(draw((9, 9, 9), rng)) for _ in range(2))
    assert find_near_duplicates(torch.ones(2, 3), torch.stack([first, second])) == {}
    assert list(find_near_duplicates(torch.ones(2, 3), torch.stack([first, first]))) == [(0, 1)]


@pytest.mark.parametrize("count", [4, 99])
def test_neighbors_in_blocks_are_those_of_all_similarities(count, monkeypatch):
    monkeypatch.setattr("hf_vit.auditing.duplicates._ROWS_AT_ONCE", 11)
    monkeypatch.setattr("hf_vit.auditing.duplicates._KEYS_AT_ONCE", 13)
    queries, keys = np.random.default_rng(0).normal(size=(2, 43, 7))
    expected = queries @ keys.T
    np.fill_diagonal(expected, -np.inf)
    similarities, rows = nearest_neighbors(torch.from_numpy(queries), torch.from_numpy(keys), count)
    np.testing.assert_array_equal(rows, np.argsort(-expected, axis=1)[:, : min(count, 42)])
    np.testing.assert_allclose(similarities, np.take_along_axis(expected, rows.numpy(), 1), rtol=1e-12)
