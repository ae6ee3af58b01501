"""Reading and preprocessing in workers, and the rest on the model's device, give the processor's own outputs."""

import pickle

import numpy as np
import pytest
import torch
from PIL import Image

from hf_vit import HfViTImageProcessor
from hf_vit.inference.batches import ImageReader, compute_batches, number_batches

RNG = np.random.default_rng(5)
IMAGES = [Image.fromarray(RNG.integers(0, 256, (height, width, 3), np.uint8)) for height, width in ((17, 9), (8, 30))]
DEEP = RNG.integers(0, 2**16, (13, 11), np.uint16)
FLOATS = RNG.random((10, 12, 3), np.float32)
SIZE = {"height": 6, "width": 10}
PROCESSORS = {  # settings -> whether workers return uint8
    "vit_jax": ({"size": SIZE}, False),
    "timm": ({"preset": "timm", "size": {"shortest_edge": 9}, "crop_size": SIZE}, True),
    "bit": ({"preset": "bit", "size": SIZE}, False),
    "native": ({"preset": "native", "patch_size": 4, "max_num_patches": 6}, False),
    "no normalization": ({"size": SIZE, "do_normalize": False}, False),
    "other mean": ({"preset": "transformers", "size": SIZE, "image_mean": [0.1, 0.2, 0.3]}, True),
}


@pytest.mark.parametrize("case", PROCESSORS)
def test_outputs_are_the_processors_to_the_bit(case):
    settings, levels = PROCESSORS[case]
    processor = HfViTImageProcessor(**settings)
    reader = pickle.loads(pickle.dumps(ImageReader(processor)))
    images = [*IMAGES, DEEP, FLOATS]
    read = reader(list(enumerate(images, start=3)))
    assert read.numbers == [3, 4, 5, 6]
    assert (read.inputs["pixel_values"].dtype == torch.uint8) == levels
    found = reader.finish(read.inputs, torch.device("cpu"))
    expected = processor(images, return_tensors="pt")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor)


@pytest.mark.parametrize("workers", [0, 2])
def test_unreadable_images_are_left_out_of_their_batch(workers):
    """Also where a whole batch is unreadable; the others keep their numbers."""
    processor = HfViTImageProcessor(size=SIZE)
    images = [IMAGES[0], b"bad", IMAGES[1], b"", b"nothing", b"x", IMAGES[0]]
    numbered = number_batches(images, 3)
    batches = list(compute_batches(dict, torch.device("cpu"), processor, numbered, workers, skip_unreadable=True))
    assert [batch.numbers for batch in batches] == [[0, 2], [], [6]]
    assert [[*batch.unreadable] for batch in batches] == [[1], [3, 4, 5], []]
    expected = processor(IMAGES, return_tensors="pt")["pixel_values"]
    assert torch.equal(batches[0].outputs["pixel_values"], expected)
    assert torch.equal(batches[2].outputs["pixel_values"], expected[:1])
