"""A model ready for batches of images, and the functions `predict`, `predict_batches` and `embed` on top of it."""

import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache, partial
from numbers import Integral, Real
from typing import Any, Literal, TypeAlias

import numpy as np

from ..files.fingerprint import fingerprint_weights
from ..files.messages import check_choice
from ..files.predictions import Batch, ClassRule, Prediction, unit_length
from ..files.versions import versions_of
from ..loading import check_classifier, load, model_and_processor
from ..models.configuration_hf_vit import HfViTConfig
from ..models.scores import score_function, scores_of, stored_thresholds
from .batches import choose_workers, compute_batches, list_of_images, number_batches
from .columns import add_columns, images_of, is_batch

_BATCH_SIZE = 8
TASKS = ("classify", "embed")
# Packages that change an output
_VERSIONS = ("hf_vit", "torch", "transformers", "numpy", "pillow", "simplejpeg", "onnxruntime", "openvino")

Model: TypeAlias = str | os.PathLike | tuple[Any, Any]  # a folder or a name on the Hub, or (model, processor)


class Predictor:
    """A model with its image processor that answers batches of images; it can be pickled, for other processes.

    It is pickled with the name of its model and its settings alone; the weights are loaded when a process first uses
    it, once for each process. A pair of objects is pickled whole.

    Called with images it returns their answers. Called with a batch of columns, as `datasets.map`, Ray Data or Daft
    pass it, it returns columns, and an image that cannot be read is a row with the reason.

    Args:
        model: a folder of `save_pretrained`, a name on the Hub, or (model, processor) as returned by `hf_vit.load`.
        task: "classify" or "embed".
        backend: as in `hf_vit.load`, for a folder or a name.
        batch_size: maximum number of images in a forward pass.
        workers: number of processes that read and preprocess ahead; 0: none; None: none for up to 64 images, else 4,
            but no more than there are processors.
        top_k, threshold, coverage, reject: as in `predict`, for "classify".
        normalize: as in `embed`, for "embed".
        device: device of the model, such as "cuda"; None: where it is.
        image_column: column of images of a batch; None: `image`, or the only column.

    Raises:
        ValueError: an argument is invalid, or the model cannot do the task.

    Example:
        >>> import hf_vit
        >>> predictor = hf_vit.Predictor("folder", top_k=1)
        >>> [[best]] = predictor(["photo.png"])
    """

    def __init__(
        self,
        model: Model,
        task: Literal["classify", "embed"] = "classify",
        backend: str | None = None,
        batch_size: int = _BATCH_SIZE,
        workers: int | None = None,
        top_k: int = 5,
        threshold: float | Literal["auto"] | None = None,
        coverage: float | None = None,
        reject: bool = False,
        normalize: bool = False,
        device: str | None = None,
        image_column: str | None = None,
    ):
        check_choice("task", task, TASKS)
        _check_count("batch_size", batch_size, 1)
        _check_count("top_k", top_k, 1)
        if workers is not None:
            _check_count("workers", workers, 0)
        if threshold not in (None, "auto"):
            _check_number("threshold", threshold)
        if coverage is not None:
            _check_number("coverage", coverage)
        self.task = task
        self.batch_size = batch_size
        self.workers = workers
        self.normalize = normalize
        self.image_column = image_column
        self._source = model
        if isinstance(model, str | os.PathLike) and os.path.exists(model):
            self._source = os.path.abspath(model)  # other processes may run in another folder
        self._backend = backend
        self._device = device
        self._fingerprints: dict[str, str] | None = None
        self._head = "none" if task == "embed" else "keep"
        self._pair: tuple[Any, Any] | None = model_and_processor(model, backend, head=self._head)
        self._rule: Any = None  # `ClassRule`, for "classify"
        self._settings: dict[str, Any] = {"task": task, "normalize": normalize}
        if device is not None:
            self._pair[0].to(device)
        if task == "classify":
            check_classifier(self.model)
            limits = {"top_k": top_k, "threshold": threshold, "coverage": coverage, "reject": reject}
            self._settings = {"task": task, **limits}
            config = self.model.config
            is_regression = score_function(config) == "none"
            limits["is_regression"] = is_regression
            self._rule = ClassRule(config.id2label, stored_thresholds(config), **limits)
        elif getattr(self.model.config, "pooling", "cls") == "none":
            raise ValueError("cannot embed images: the model's pooling is 'none' (expected 'cls', 'mean' or 'map')")

    @property
    def model(self) -> Any:
        return self._load()[0]

    @property
    def processor(self) -> Any:
        return self._load()[1]

    def _load(self) -> tuple[Any, Any]:
        if self._pair is None:  # after unpickling
            self._pair = _load_once(self._source, self._backend, self._head, self.fingerprint)
            if self._device is not None:
                self._pair[0].to(self._device)
        return self._pair

    def to(self, device: str) -> "Predictor":
        """Move the model to a device, and return this predictor."""
        if device != self._device:
            self._device = device
            self.model.to(device)
        return self

    @property
    def fingerprints(self) -> dict[str, str]:
        """What the answers depend on: hashes of "model" and "preprocessing", and the "settings" and "software"."""
        if self._fingerprints is None:
            model = self.model
            labels = None
            if self.task == "classify":
                labels = model.config.to_dict().get("id2label")
            else:
                model = model.base_model
            self._fingerprints = {
                "model": _digest([type(model).__name__, fingerprint_weights(model), labels]),
                "preprocessing": _digest(self.processor.to_dict()),
                "settings": json.dumps(self._settings),
                "software": ", ".join(f"{name} {version}" for name, version in versions_of(_VERSIONS).items()),
            }
        return self._fingerprints

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the task, the weights, the settings of model and processor, and the versions of the packages."""
        return _digest(self.fingerprints)

    def __getstate__(self) -> dict[str, Any]:
        if isinstance(self._source, tuple):
            return vars(self).copy()
        return {**vars(self), "_pair": None, "_fingerprints": self.fingerprints}

    def __call__(self, images: Any) -> Any:
        """Return the answers for all images.

        Args:
            images: as in `predict`, or a column of Arrow; or a batch of columns: a dictionary of lists or arrays, a
                table of Arrow or a DataFrame of pandas.

        Returns:
            For "classify" a list with a list of `Prediction` for each image; for "embed" (images, features) float32.
            For a batch of columns a batch of the same kind: its other columns, and those of `columns`.

        Raises:
            ValueError: there are no images, or an output is NaN or infinite.
            ImageReadingError: an image cannot be read; the message names its file.
        """
        if is_batch(images):
            name, listed = images_of(images, self.image_column)
            return add_columns(images, name, self.columns(listed))
        outputs = [batch.outputs for batch in self.batches(images)]
        if not outputs:
            raise ValueError("there are no images")
        if self.task == "embed":
            return np.concatenate(outputs)
        return [predictions for batch in outputs for predictions in batch]

    def columns(self, images: Any) -> dict[str, Any]:
        """Return the answers for all images as columns.

        Args:
            images: as in `predict`.

        Returns:
            For "embed" "features", (images, features) float32; for "classify" "labels" and "scores", a list for each
            image. "error" is empty, or says why an image cannot be read; its features are NaN and its lists empty.
        """
        batches = list(self.batches(images, skip_unreadable=True))
        count = sum(len(batch.numbers) + len(batch.unreadable) for batch in batches)
        return self.join(batches, range(count))

    def join(self, batches: Iterable[Batch], numbers: range) -> dict[str, Any]:
        """Return batches as columns, see `columns`.

        Args:
            batches: of all images with these numbers.
            numbers: the numbers of the images.
        """
        errors = [""] * len(numbers)
        answers: list[Any] = [None] * len(numbers)
        for batch in batches:
            for number, error in batch.unreadable.items():
                errors[number - numbers.start] = str(error)
            for number, answer in zip(batch.numbers, batch.outputs, strict=True):
                answers[number - numbers.start] = answer
        if self.task == "embed":
            return {"features": self._stack(answers), "error": errors}
        labels = [[one.label for one in answer or []] for answer in answers]
        scores = [[number for _, number in answer or []] for answer in answers]
        return {"labels": labels, "scores": scores, "error": errors}

    def _stack(self, answers: Sequence[np.ndarray | None]) -> np.ndarray:
        """Return the features of images as rows; those of an image that cannot be read are NaN."""
        read = {row: answer for row, answer in enumerate(answers) if answer is not None}
        width = len(next(iter(read.values()))) if read else self.num_features
        features = np.full((len(answers), width), np.nan, np.float32)
        for row, answer in read.items():
            features[row] = answer
        return features

    @property
    def num_features(self) -> int:
        """Number of features of an image, for "embed"."""
        gray = np.zeros((32, 32, getattr(self.model.config, "num_channels", 3)), np.uint8)
        return self([gray]).shape[1]

    def batches(self, images: Any, skip_unreadable: bool = False) -> Iterator[Batch]:
        """Return an iterator of `Batch`: the answers for some images, computed while it is iterated.

        Args:
            images: as in `predict`.
            skip_unreadable: skip images that cannot be read; they are in `unreadable` of their batch.
        """
        listed = list_of_images(images)
        workers = choose_workers(self.workers, listed)
        return self.answer(number_batches(listed, self.batch_size), workers, skip_unreadable)

    def answer(
        self,
        batches: Iterable[Sequence[tuple[int, Any]]],
        workers: int = 0,
        skip_unreadable: bool = False,
        **options: Any,
    ) -> Iterator[Batch]:
        """Return an iterator of the answers for batches of (number, image).

        Args:
            batches, options: as in `compute_batches`.
        """
        model = self.model
        compute = model
        answer = self._classes
        if self.task == "embed":
            model = model.base_model
            compute = partial(model, only_pooled=True) if isinstance(model.config, HfViTConfig) else model
            answer = self._features
        found = compute_batches(compute, model.device, self.processor, batches, workers, skip_unreadable, **options)
        return (batch._replace(outputs=answer(batch)) for batch in found)

    def _classes(self, batch: Batch) -> list[list[Prediction]]:
        if not batch.numbers:
            return []
        logits = batch.outputs.logits[: len(batch.numbers)]
        if logits.ndim != 2:
            raise ValueError("cannot classify images: the model computes logits of every token (pooling 'none')")
        if not logits.isfinite().all():
            raise ValueError("cannot classify images: the model computes NaN or infinite logits")
        scores = scores_of(logits, self.model.config)
        return self._rule.classes(logits.float().cpu().numpy(), scores.cpu().numpy())

    def _features(self, batch: Batch) -> np.ndarray:
        if not batch.numbers:
            return np.empty((0, 0), np.float32)
        features = batch.outputs.pooler_output[: len(batch.numbers)].float().cpu().numpy()
        are_finite = np.isfinite(features).all(axis=1)
        if not are_finite.all():
            first = batch.numbers[int(are_finite.argmin())]
            raise ValueError(f"the model computes NaN or infinite features, first for image {first}")
        return unit_length(features) if self.normalize else features


@lru_cache(maxsize=1)
def _load_once(name: str | os.PathLike, backend: str | None, head: Any, fingerprint: str) -> tuple[Any, Any]:
    """Load a model for all unpickled copies of a predictor in this process; another fingerprint is loaded again."""
    return load(name, head=head, backend=backend)


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


def predict(
    model: Model,
    images: Any,
    top_k: int = 5,
    batch_size: int = _BATCH_SIZE,
    backend: str | None = None,
    threshold: float | Literal["auto"] | None = None,
    coverage: float | None = None,
    reject: bool = False,
) -> list[list[Prediction]]:
    """Predict the `top_k` most likely classes of every image, most likely first.

    Args:
        model: a folder of `save_pretrained`, a name on the Hub, or (model, processor) as returned by `hf_vit.load`.
        images: a folder (the image files in it and in its subfolders, sorted), one image or several: a list, a column
            of `datasets` or a generator. An image is a path, a URL, bytes, an open file, a PIL image, or an array or
            tensor of 2 or 3 dimensions.
        batch_size: maximum number of images in a forward pass.
        backend: as in `hf_vit.load`, for a folder or a name.
        threshold: instead of `top_k`, predict all classes with at least this score; "auto": with at least their own
            thresholds, which training chose for images with several labels.
        coverage: instead of `top_k`, predict sets of classes that hold the right one with this frequency: 0.8, 0.9,
            0.95 or 0.99, of a model that `hf_vit.calibrate` wrote.
        reject: predict no class for an image that is unlike those of all classes, of a model that `hf_vit.calibrate`
            wrote.

    Returns:
        For each image, in their order, its classes as `Prediction`, (label, score); of a regression, all targets as
        `TargetValue`, (label, value).

    Raises:
        ValueError: an argument is invalid, there are no images, an image cannot be read (the message names it), or the
            model is not a classifier.

    Example:
        >>> import hf_vit
        >>> [classes] = hf_vit.predict("folder", "photo.png", top_k=3)
        >>> labels = [prediction.label for prediction in classes]
    """
    options = {"threshold": threshold, "coverage": coverage, "reject": reject}
    return Predictor(model, "classify", backend, batch_size, top_k=top_k, **options)(images)


def predict_batches(model: Model, images: Any, skip_unreadable: bool = False, **options: Any) -> Iterator[Batch]:
    """Predict classes batch by batch, while the result is iterated; model and arguments are checked at once.

    Args:
        model, images: as in `predict`.
        skip_unreadable: skip images that cannot be read, instead of raising ImageReadingError.
        options: more arguments of `Predictor`, such as `top_k` and `workers`.

    Returns:
        Batches with the indices of their images (`numbers`), the classes of each of these (`outputs`), and the skipped
        images (`unreadable`, index -> error).

    Example:
        >>> import hf_vit
        >>> for batch in hf_vit.predict_batches("folder", ["photo.png"] * 3, batch_size=2):
        ...     best = [classes[0].label for classes in batch.outputs]
    """
    return Predictor(model, "classify", **options).batches(images, skip_unreadable)


def embed(
    model: Model,
    images: Any,
    batch_size: int = _BATCH_SIZE,
    workers: int | None = None,
    normalize: bool = False,
) -> np.ndarray:
    """Compute the features of images: the input of a classifier's head (`pooler_output`).

    Args:
        model, images, batch_size: as in `predict`; a model of any class, with a head or without.
        workers: as in `Predictor`.
        normalize: divide each feature vector by its length (L2).

    Returns:
        (images, features) float32

    Raises:
        ValueError: an argument is invalid, there are no images, the model does not pool, or a feature is NaN or
            infinite.
        ImageReadingError: an image cannot be read; the message names its file.

    Example:
        >>> import hf_vit
        >>> from hf_vit.inference.search import search
        >>> features = hf_vit.embed("folder", ["photo.png"], normalize=True)
        >>> rows, cosines = search(features, features[:1], top_k=1)
        >>> rows.tolist()
        [[0]]
    """
    return Predictor(model, "embed", batch_size=batch_size, workers=workers, normalize=normalize)(images)


def _check_count(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise ValueError(f"{name} is {value!r}; it must be an integer of at least {least}")


def _check_number(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, Real) or math.isnan(value):
        raise ValueError(f"{name} is {value!r}; it must be a number")
