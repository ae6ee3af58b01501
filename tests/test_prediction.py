"""Prediction for many images: outputs, their order, and processes that are left."""

import _thread
import itertools
import multiprocessing

import pytest
import torch

from hf_vit.loading import load
from hf_vit.models.image_reading import ImageReadingError
from hf_vit.prediction import predict_batches

from .tiny_models import write_images


@pytest.fixture
def pair(folder):
    return load(folder)


@pytest.fixture
def files(tmp_path):
    """Images; no batch size of the tests divides their number."""
    return sorted(map(str, write_images(tmp_path / "images", 23).iterdir()))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("optimized", [False, True])
def test_batched_outputs_equal_those_of_each_image_in_order(pair, files, optimized, workers):
    """Equal to rounding: kernels of matrix products depend on the number of rows."""
    model, processor = pair
    with torch.inference_mode():
        alone = torch.cat([model(**processor(file, return_tensors="pt")).logits for file in files])
    if optimized:
        model = model.optimize_for_inference()
    outputs = [batch.logits for batch in predict_batches(model, processor, iter(files), 4, workers)]
    assert [len(logits) for logits in outputs] == [4, 4, 4, 4, 4, 3]
    torch.testing.assert_close(torch.cat(outputs), alone, rtol=1e-5, atol=1e-5)
    assert multiprocessing.active_children() == []


def test_no_images_have_no_outputs(pair):
    assert list(predict_batches(pair[0], pair[1], [])) == []


@pytest.mark.parametrize("workers", [0, 2])
def test_an_unreadable_image_is_an_error_after_the_earlier_batches(pair, files, tmp_path, workers):
    bad = tmp_path / "bad.jpg"
    bad.write_text("no picture")
    outputs = predict_batches(pair[0], pair[1], iter([*files[:9], str(bad), *files[9:]]), 4, workers)
    assert len([next(outputs), next(outputs)]) == 2
    next(outputs)  # the image before the unreadable one
    with pytest.raises(ImageReadingError, match=r"^\S*bad\.jpg"):
        next(outputs)
    assert multiprocessing.active_children() == []


def test_images_are_taken_from_the_source_only_when_needed(pair, files):
    """The source is infinite; leaving the loop ends all processes."""
    taken = []
    endless = (taken.append(file) or file for file in itertools.cycle(files))
    for number, _ in enumerate(predict_batches(pair[0], pair[1], endless, 4, 2), start=1):
        assert len(taken) <= 4 * (number + 2 * 2)
        if number == 5:
            break
    assert multiprocessing.active_children() == []


def test_ctrl_c_leaves_no_processes(pair, files):
    model, processor = pair
    endless = ((number == 9 and _thread.interrupt_main()) or file for number, file in enumerate(itertools.cycle(files)))
    with pytest.raises(KeyboardInterrupt):
        list(predict_batches(model, processor, endless, 4, 2))
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("wrong", [{"batch_size": 0}, {"workers": -1}, {"images": "cat.png"}])
def test_bad_batch_sizes_numbers_of_workers_and_lists_are_refused(pair, files, wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        next(predict_batches(pair[0], pair[1], **{"images": files} | wrong))
