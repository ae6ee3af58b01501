"""From the bytes of JPEG files to the original's logits, with a real model; photographs and weights may be absent."""

import zipfile

import numpy as np
import pytest
import torch

import hf_vit
from hf_vit.conversion import convert


@pytest.fixture(scope="module")
def expected(shared):
    """104 names and, by preset, the logits of the original code, (104, 1000)."""
    file = shared / "goldens" / "bytes.npz"
    if not file.is_file():
        pytest.skip("bytes.npz is not next to the checkout")
    return np.load(file)


@pytest.fixture(scope="module")
def photographs(shared, expected, tmp_path_factory):
    """Paths of the 104 photographs."""
    folder = tmp_path_factory.mktemp("photographs")
    with zipfile.ZipFile(shared / "data/imagenet_sample/images.zip") as archive:
        members = {name.split("/")[-1]: name for name in archive.namelist()}
        for name in expected["names"]:
            (folder / name).write_bytes(archive.read(members[name]))
    return [folder / name for name in expected["names"]]


@pytest.fixture(scope="module")
def ti16(shared, tmp_path_factory):
    folder = tmp_path_factory.mktemp("real") / "ti16"
    convert(shared / "weights/Ti_16-imagenet2012-res_224.npz", preset="vit_jax").save(folder)
    return folder


@pytest.mark.parametrize("preset", ["vit_jax", "augreg"])
def test_logits_equal_the_original(preset, expected, photographs, ti16):
    model, processor = hf_vit.load(ti16, preset=preset)
    assert processor.jpeg_dct == "fast"
    logits = []
    for start in range(0, len(photographs), 26):
        inputs = processor(photographs[start : start + 26], return_tensors="pt")
        with torch.no_grad():
            logits.append(model(**inputs).logits)
    logits = torch.cat(logits).double().numpy()
    np.testing.assert_allclose(logits, expected[preset], rtol=0, atol=1e-4)
    assert (logits.argmax(axis=1) == expected[preset].argmax(axis=1)).all()
