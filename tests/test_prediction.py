"""Prediction for many images: outputs, their order, and threads that are left."""

import _thread
import itertools
import threading

import pytest
import torch
from PIL import Image

from hf_vit.loading import load
from hf_vit.prediction import predict_batches


@pytest.fixture
def pair(folder):
    return load(folder)


@pytest.fixture
def files(tmp_path):
    """Images; no batch size of the tests divides their number."""
    generator = torch.Generator().manual_seed(0)
    paths = [str(tmp_path / f"{number}.png") for number in range(23)]
    for path in paths:
        levels = torch.randint(256, (31, 43, 3), dtype=torch.uint8, generator=generator)
        Image.fromarray(levels.numpy()).save(path)
    return paths


def workers_left():
    return [thread for thread in threading.enumerate() if thread.name.startswith("hf_vit")]


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("kind", ["plain", "optimised", "with a hook"])
def test_batched_outputs_equal_those_of_each_image_in_order(pair, files, kind, workers):
    """Equal to rounding: kernels of matrix products depend on the number of rows."""
    model, processor = pair
    with torch.inference_mode():
        alone = torch.cat([model(**processor(file, return_tensors="pt")).logits for file in files])
    seen = []
    if kind == "optimised":
        model = model.optimize_for_inference()
    elif kind == "with a hook":
        model.register_forward_hook(lambda *_: seen.append(threading.current_thread()))
    threads = torch.get_num_threads()
    outputs = [batch.logits for batch in predict_batches(model, processor, iter(files), 4, workers)]
    assert [len(logits) for logits in outputs] == [4, 4, 4, 4, 4, 3]
    torch.testing.assert_close(torch.cat(outputs), alone, rtol=1e-5, atol=1e-5)
    assert set(seen) <= {threading.main_thread()}
    assert (workers_left(), torch.get_num_threads()) == ([], threads)


def test_images_are_distributed_equally_to_the_workers(pair, files):
    sizes = [len(batch.logits) for batch in predict_batches(pair[0], pair[1], files[:7], 32, 3)]
    assert sizes == [3, 3, 1]
    sizes = [len(batch.logits) for batch in predict_batches(pair[0], pair[1], files[:10], 4, 2)]
    assert sizes == [3, 3, 3, 1]
    assert list(predict_batches(pair[0], pair[1], [])) == []


def test_an_unreadable_image_is_an_error_after_the_earlier_batches(pair, files, tmp_path):
    bad = tmp_path / "bad.jpg"
    bad.write_text("no picture")
    outputs = predict_batches(pair[0], pair[1], iter([*files[:9], str(bad), *files[9:]]), 4, 2)
    assert len([next(outputs), next(outputs)]) == 2
    with pytest.raises(ValueError, match=r"bad\.jpg"):
        next(outputs)
    assert workers_left() == []


def test_images_are_taken_from_the_source_only_when_needed(pair, files):
    """The source is infinite; leaving the loop ends all threads."""
    taken = []
    endless = (taken.append(file) or file for file in itertools.cycle(files))
    for number, _ in enumerate(predict_batches(pair[0], pair[1], endless, 4, 2), start=1):
        assert len(taken) <= 4 * (number + 2 * 2)
        if number == 5:
            break
    assert workers_left() == []


def test_ctrl_c_leaves_no_threads(pair, files):
    model, processor = pair
    calls = []

    def interrupted(images, **kwargs):
        calls.append(images)
        if len(calls) == 3:
            _thread.interrupt_main()
        return processor(images, **kwargs)

    with pytest.raises(KeyboardInterrupt):
        list(predict_batches(model, interrupted, itertools.cycle(files), 4, 2))
    assert workers_left() == []
    assert len(calls) < 20


@pytest.mark.parametrize("wrong", [{"batch_size": 0}, {"workers": 0}])
def test_zero_batch_size_or_workers_are_refused(pair, files, wrong):
    with pytest.raises(ValueError, match="both must be at least 1"):
        next(predict_batches(pair[0], pair[1], files, **wrong))
