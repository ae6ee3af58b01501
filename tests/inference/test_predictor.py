"""Prediction for many images: outputs, their order, and processes that are left."""

import _thread
import io
import itertools
import multiprocessing
import pickle
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from PIL import Image

import hf_vit
from hf_vit import Predictor, predict_batches
from hf_vit.loading import load
from hf_vit.models.image_reading import ImageReadingError

from ..tiny_models import write_images


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
        alone = [model(**processor(file, return_tensors="pt")).logits[0].softmax(0) for file in files]
    if optimized:
        model = model.optimize_for_inference()
    options = {"batch_size": 4, "workers": workers, "top_k": 99}
    batches = list(predict_batches((model, processor), iter(files), **options))
    assert [len(batch.outputs) for batch in batches] == [4, 4, 4, 4, 4, 3]
    assert [number for batch in batches for number in batch.numbers] == list(range(23))
    found = [dict(classes) for batch in batches for classes in batch.outputs]
    labels = model.config.id2label
    found = torch.tensor([[scores[labels[n]] for n in range(len(labels))] for scores in found])
    torch.testing.assert_close(found, torch.stack(alone), rtol=1e-5, atol=1e-5)
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("workers", [0, 2])
def test_an_unreadable_image_is_an_error_after_the_earlier_batches(pair, files, tmp_path, workers):
    bad = tmp_path / "bad.jpg"
    bad.write_text("no picture")
    outputs = predict_batches(pair, iter([*files[:9], str(bad), *files[9:]]), batch_size=4, workers=workers)
    assert len([next(outputs), next(outputs)]) == 2
    with pytest.raises(ImageReadingError, match=r"^\S*bad\.jpg"):
        next(outputs)
    assert multiprocessing.active_children() == []


def test_images_are_taken_from_the_source_only_when_needed(pair, files):
    """The source is infinite; leaving the loop ends all processes."""
    taken = []
    endless = (taken.append(file) or file for file in itertools.cycle(files))
    for number, _ in enumerate(predict_batches(pair, endless, batch_size=4, workers=2), start=1):
        assert len(taken) <= 4 * (number + 2 * 2)
        if number == 5:
            break
    assert multiprocessing.active_children() == []


def test_ctrl_c_leaves_no_processes(pair, files):
    endless = ((number == 9 and _thread.interrupt_main()) or file for number, file in enumerate(itertools.cycle(files)))
    with pytest.raises(KeyboardInterrupt):
        list(predict_batches(pair, endless, batch_size=4, workers=2))
    assert multiprocessing.active_children() == []


WRONG = [
    ("batch_size", {"batch_size": 0}),
    ("batch_size", {"batch_size": 2.5}),
    ("workers", {"workers": -1}),
    ("top_k", {"top_k": 0}),
    ("top_k", {"top_k": -1}),
    ("top_k", {"top_k": 2.5}),
    ("top_k", {"top_k": True}),
    ("threshold", {"threshold": "half"}),
    ("threshold", {"threshold": float("nan")}),
    ("coverage", {"coverage": "most"}),
    ("task", {"task": "segment"}),
]


@pytest.mark.parametrize(("name", "wrong"), WRONG)
def test_wrong_arguments_are_refused_at_the_call(pair, name, wrong):
    with pytest.raises(ValueError, match=name):
        Predictor(pair, **wrong)


WRONG_MODELS = {
    "a model": lambda model, processor: model,
    "swapped": lambda model, processor: (processor, model),
    "one": lambda model, processor: (model,),
    "three": lambda model, processor: (model, processor, 1),
    "two models": lambda model, processor: (model, model),
    "a list": lambda model, processor: [model, processor],
    "nothing": lambda model, processor: None,
}


@pytest.mark.parametrize("wrong", WRONG_MODELS.values(), ids=WRONG_MODELS)
@pytest.mark.parametrize("function", [hf_vit.predict, hf_vit.predict_batches, hf_vit.embed])
def test_other_objects_than_a_name_or_a_pair_are_refused_in_one_sentence(pair, files, function, wrong):
    with pytest.raises(ValueError, match=r"hf_vit\.load"):
        function(wrong(*pair), files)


def test_an_unknown_model_is_an_error_at_the_call(files):
    with pytest.raises(OSError, match="no_such"):
        hf_vit.predict_batches("./no_such", files)


NO_IMAGES = {"list": [], "tuple": (), "folder": "an empty folder", "array": np.zeros((0, 20, 36, 3), np.uint8)}


@pytest.mark.parametrize("images", [*NO_IMAGES.values(), iter([])], ids=[*NO_IMAGES, "iterator"])
def test_no_images_are_an_error(pair, images, tmp_path):
    for function in (hf_vit.predict, hf_vit.embed):
        with pytest.raises(ValueError, match="images"):
            function(pair, tmp_path if isinstance(images, str) else images)


@pytest.mark.parametrize("images", [3, None, np.zeros(5), np.zeros((1, 1, 5, 5, 3)), [np.zeros((2, 5, 5, 3))]], ids=str)
def test_what_is_no_image_is_refused(pair, images):
    for function in (hf_vit.predict, hf_vit.embed):
        with pytest.raises(ValueError, match="image"):
            function(pair, images)


def array_of(file):
    return np.asarray(Image.open(file).convert("RGB"))


ONE = {
    "path": Path,
    "str": str,
    "bytes": lambda file: Path(file).read_bytes(),
    "buffer": lambda file: io.BytesIO(Path(file).read_bytes()),
    "row of datasets": lambda file: {"bytes": Path(file).read_bytes(), "path": None},
    "PIL": lambda file: Image.open(file).copy(),
    "array": array_of,
    "tensor": lambda file: torch.from_numpy(array_of(file).copy()).permute(2, 0, 1),
    "gray array": lambda file: array_of(file)[..., 0],
}


@pytest.mark.parametrize("kind", ONE.values(), ids=ONE)
def test_one_image_has_one_answer(pair, files, kind):
    [alone] = hf_vit.predict(pair, kind(files[0]))
    [listed] = hf_vit.predict(pair, [kind(files[0])])
    assert alone == listed
    assert len(alone) == 5
    assert hf_vit.embed(pair, kind(files[0])).shape == (1, pair[0].config.hidden_size)


def test_an_open_file_is_one_image(pair, files):
    with open(files[0], "rb") as file:
        assert hf_vit.predict(pair, file) == hf_vit.predict(pair, files[:1])


def test_folders_columns_batches_and_generators_are_their_images(pair, files):
    expected = hf_vit.predict(pair, files)
    folder = Path(files[0]).parent
    column = datasets.Dataset.from_dict({"image": files}, datasets.Features({"image": datasets.Image()}))["image"]
    for images in (folder, str(folder), tuple(files), (file for file in files), column):
        assert hf_vit.predict(pair, images) == expected
    stacked = np.zeros((3, 20, 36, 3), np.uint8)
    assert len(hf_vit.predict(pair, stacked)) == len(hf_vit.embed(pair, torch.from_numpy(stacked))) == 3


def test_skipped_images_are_named(pair, files, tmp_path):
    bad = tmp_path / "bad.jpg"
    bad.write_text("no picture")
    batches = list(predict_batches(pair, [files[0], bad, files[1]], skip_unreadable=True))
    assert [number for batch in batches for number in batch.numbers] == [0, 2]
    assert [(number, str(bad) in str(error)) for batch in batches for number, error in batch.unreadable.items()] == [
        (1, True)
    ]


def test_a_pickled_predictor_has_no_weights_and_is_loaded_once(folder, files, monkeypatch):
    predictor = Predictor(str(folder), top_k=2)
    content = pickle.dumps(predictor)
    assert len(content) < 2000
    assert len(pickle.dumps(Predictor(load(folder)))) > 2000
    loaded = []
    monkeypatch.setattr("hf_vit.inference.predictor.load", lambda *a, **k: loaded.append(a) or load(*a, **k))
    copies = [pickle.loads(content) for _ in range(2)]
    assert all(copied(files) == predictor(files) for copied in copies)
    assert len(loaded) == 1
    assert copies[0].fingerprint == predictor.fingerprint


def test_the_fingerprint_depends_on_all_that_changes_an_answer(folder):
    model, processor = load(folder)
    first = Predictor((model, processor)).fingerprint
    assert first == Predictor(folder).fingerprint == Predictor((model, processor), batch_size=3).fingerprint
    others = [Predictor((model, processor), "embed").fingerprint]
    processor.update(background=[0, 0, 0])
    others.append(Predictor((model, processor)).fingerprint)
    with torch.no_grad():
        next(model.parameters()).view(-1)[0] += 1
    others.append(Predictor((model, processor)).fingerprint)
    assert len({first, *others}) == 4


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["openvino", "onnxruntime"])
def test_the_fingerprint_of_a_program_depends_on_its_weights(folder, backend):
    pytest.importorskip(backend)
    first = Predictor(folder, backend=backend).fingerprint
    model, processor = load(folder)
    assert first == Predictor((hf_vit.use_backend(model, backend), processor)).fingerprint
    with torch.no_grad():
        next(model.parameters()).view(-1)[0] += 1
    assert first != Predictor((hf_vit.use_backend(model, backend), processor)).fingerprint
