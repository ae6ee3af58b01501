"""A head in closed form on frozen features: `hf-vit finetune --recipe instant`.

The encoder computes the features of each image once, and regularized least squares gives the head, as in few-shot
evaluation (section 4.1 of arXiv 2010.11929). The features of the training images stay next to the model, so that
classes can be added and removed without the images.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from ..data.augmentation import TrainTransform, sample_generator
from ..data.labels import names_of
from ..data.splits import Split
from ..data.summary import write_unused
from ..files.messages import join_names
from ..files.output import new_model_files, write_json, write_text
from ..files.readme import write_readme
from ..inference.batches import ImageReader
from ..inference.least_squares import LeastSquares, class_targets
from ..inference.predictions import EvaluationBatches, collect, evaluate_classifier, model_inputs
from ..inference.regression import TargetScale, evaluate_regression
from ..loading import find_model, load
from ..models.configuration_hf_vit import HfViTConfig
from ..models.image_processing_hf_vit import flip_channels
from ..settings.fields import AUTO, FinetuneSettings
from ..settings.recipes import dump
from .build import FEATURES_FILE, class_names_of, fingerprint_run, load_for_finetuning, train_transform
from .checkpoint import locked_output
from .reports import explanation_of, write_run_reports
from .run import Run, TrainState


class ViewReader(ImageReader):
    """Reader of a random view of each image, by the augmentation of training.

    Args:
        view: its number, on which the random numbers depend.
    """

    def __init__(self, processor: Any, transform: TrainTransform, seed: int, view: int):
        super().__init__(processor)
        self.transform = transform
        self.seed = seed
        self.view = view
        self.returns_levels = True

    def _preprocess(self, batch: Sequence[tuple[int, Any]]) -> dict[str, torch.Tensor]:
        pixels = []
        for row, image in batch:
            rng = sample_generator(self.seed, self.view, max(row, 0))
            if isinstance(image, dict):
                pixels.append(self.transform.load(image, rng)["image"])
            else:  # padding of a batch
                pixels.append(self.transform(image, rng))
        levels = torch.from_numpy(np.stack(pixels)).movedim(-1, 1)  # (batch, channels, height, width)
        if self.processor.do_flip_channel_order:
            levels = flip_channels(levels)
        return {"pixel_values": levels}


class TrainingFeatures(NamedTuple):
    """The inputs of a head and their labels: all that its solution in closed form depends on.

    The views of an image are consecutive rows.
    """

    values: torch.Tensor  # (rows, features) float32
    labels: torch.Tensor  # class indices (rows,); or several labels' indicators or targets (rows, outputs)

    def save(self, folder: Path, views: int) -> None:
        """Write them next to a model."""
        tensors = {"features": self.values, "labels": self.labels}
        save_file(tensors, folder / FEATURES_FILE, {"views": str(views)})

    def without(self, removed: list[int]) -> "TrainingFeatures":
        """Return the features of the images of all other classes, which are numbered anew in their order."""
        kept = ~torch.isin(self.labels, torch.tensor(removed))
        shift = torch.tensor([int(self.labels.new_tensor(removed).lt(number).sum()) for number in self.labels[kept]])
        return TrainingFeatures(self.values[kept], self.labels[kept] - shift)


def read_features(model: str, views: int) -> TrainingFeatures:
    """Read the features next to a model that was solved in closed form.

    Raises:
        ValueError: there are none, or images have several labels, or another number of views.
    """
    file = find_model(model).find(FEATURES_FILE)
    if file is None:
        raise ValueError(
            f"{model} has no {FEATURES_FILE}, which --add and --remove need: they change the folder that "
            "`hf-vit finetune --recipe instant` wrote"
        )
    stored = load_file(file)
    with safe_open(file, "pt") as opened:
        known = int((opened.metadata() or {}).get("views", 1))
    if known != views:
        raise ValueError(f"views is {views}, but {model} has {known} views of each image: set --views {known}")
    if stored["labels"].ndim > 1:
        raise ValueError(f"images of {model} have several labels or targets each: none can be added or removed alone")
    return TrainingFeatures(stored["features"], stored["labels"])


def change_classes(names: list[str], added: list[str], removed: list[str], model: str) -> list[str]:
    """Return the class names of a model after a change: its own, without the removed ones, then the added ones.

    Raises:
        ValueError: an added class exists, a removed one does not, or fewer than two are left.
    """
    if unknown := [name for name in removed if name not in names]:
        raise ValueError(f"--remove {unknown[0]}: {model} has no such class; it has {join_names(names, 10)}")
    kept = [name for name in names if name not in removed]
    if known := [name for name in added if name in kept]:
        raise ValueError(
            f"--add has images of {known[0]}, which is a class of {model}: give it another name, or --remove it too"
        )
    if len(kept) + len(added) < 2:
        raise ValueError(f"{model} would have {len(kept) + len(added)} class, but needs two")
    return [*kept, *added]


@dataclass
class ClosedFormRun:
    """A head that is solved for in closed form, with what the reports of a run need.

    Args:
        split, eval_split: the images for training and for evaluation; None where a class is only removed.
        command: the command line or the Python call, for the model card.

    Raises:
        ValueError: the settings do not fit the model or the data.
    """

    settings: FinetuneSettings
    accelerator: Accelerator
    split: Split | None
    eval_split: Split | None
    command: str | None = None

    def __post_init__(self) -> None:
        settings = self.settings
        self.output = Path(str(settings.output_dir))
        self.known: TrainingFeatures | None = None  # of earlier images
        if settings.add is None and not settings.remove:
            assert self.split is not None
            self.model, self.processor = load_for_finetuning(settings, self.split)
        else:
            self._load_with_changed_classes(str(settings.model))
        self.config: Any = self.model.config
        if getattr(self.config, "pooling", "cls") == "none":
            raise ValueError(f"{settings.model} has no features of whole images: its pooling is none")
        if settings.views > 1 and self.config.num_channels not in (1, 3):
            raise ValueError(f"views is {settings.views}, which needs images with 1 or 3 channels")
        self.model = self.accelerator.prepare_model(self.model, evaluation_mode=True)
        self.predictions: dict[str, Any] = {}  # of the images for evaluation, see `evaluate_classifier`
        self.run = Run(settings, self.accelerator, self.config, self.split, self.eval_split, 0, self.command)
        self.run.fingerprint = {"data": None}

    def _load_with_changed_classes(self, source: str) -> None:
        """Load a model that was solved in closed form, with a new head for the changed classes."""
        known = read_features(source, self.settings.views)
        names = names_of(load(source, head="keep", backend="eager")[0].config)
        added = [] if self.split is None else class_names_of(self.split)
        changed = change_classes(names, added, self.settings.remove, source)
        self.known = known.without([names.index(name) for name in self.settings.remove])
        self.model, self.processor = load(source, head="new", labels=changed, keep_pre_logits=True)
        self.model.config.name_or_path = self.model.name_or_path = source
        self.model.config.problem_type = "single_label_classification"
        first = len(changed) - len(added)  # the number of the first new class
        for split in (self.split, self.eval_split):
            if split is not None:
                split.numbers = [first + number for number in (split.numbers or range(split.num_labels))]
                split.num_labels = len(changed)
                split.label_names = changed

    def fit(self) -> dict[str, Any]:
        """Solve for the head, evaluate it, save the model with its reports, and return its metrics."""
        settings = self.settings
        with locked_output(self.output, settings, self.accelerator):
            started = time.perf_counter()
            features, skipped = self.compute_features()
            l2, metrics = self.solve(features)
            seconds = time.perf_counter() - started
            images = len(features.values) // settings.views
            metrics |= {"train_images": images, "train_images_skipped": skipped}
            metrics |= {"train_seconds": seconds, "train_images_per_second": images / seconds}
            if self.split is not None:
                self.run.fingerprint = fingerprint_run(settings, self.split)
            metrics = {**self.evaluate(), "l2_reg": l2, **metrics}
            metrics |= {"best": None, "best_metric": None, "best_step": None}  # there is one model
            if self.accelerator.is_main_process:
                model = self.accelerator.unwrap_model(self.model)
                with new_model_files(self.output) as draft:
                    model.save_pretrained(draft)
                    self.processor.save_pretrained(draft)
                    write_readme(draft, model.config.model_type, type(model).__name__)
                    features.save(draft, settings.views)
                write_text(self.output / "recipe.yaml", dump(settings))
                write_json(self.output / "metrics.json", metrics)
                write_unused(self.output, {} if self.split is None else self.split.unused)
                explain = explanation_of(self.run, self.model, self.processor)
                write_run_reports(self.run, TrainState(), self.predictions, metrics, explain)
            self.accelerator.wait_for_everyone()
        return metrics

    def compute_features(self) -> tuple[TrainingFeatures, int]:
        """Return the features of the earlier images and the training images, and the number of unreadable ones.

        Raises:
            ValueError: no image can be read, or features are not finite.
        """
        if self.split is None:
            assert self.known is not None
            return self.known, 0
        views = [self._compute_view(view) for view in range(self.settings.views)]
        columns = views[0]
        columns["features"] = np.stack([view["features"] for view in views], axis=1)  # (images, views, features)
        columns["features"] = columns["features"].reshape(-1, columns["features"].shape[2])
        for name in ("label", "index"):
            columns[name] = columns[name].repeat(len(views), axis=0)
        if not len(columns["index"]):
            raise ValueError(f"none of the {len(self.split)} training images can be read")
        found = TrainingFeatures(torch.from_numpy(columns["features"]), torch.from_numpy(columns["label"]))
        finite = found.values.isfinite().all(dim=1)
        if not finite.all():
            first = columns["index"][int(finite.int().argmin())]
            raise ValueError(f"features of {self.settings.model} are NaN or infinite, first for image {first}")
        if self.known is not None:
            found = TrainingFeatures(*map(torch.cat, zip(self.known, found, strict=True)))
        return found, columns["skipped"]

    def _compute_view(self, view: int) -> dict[str, Any]:
        """Return the features of one view of each training image, as `collect`; view 0 is the image itself."""
        settings = self.settings
        assert self.split is not None
        reader = None
        if view:
            transform = train_transform(settings, self.processor, self.config)
            reader = ViewReader(self.processor, transform, settings.seed, view)
        batches = EvaluationBatches(settings, self.split, self.processor, self.config, self.accelerator, reader)
        encoder: Any = self.accelerator.unwrap_model(self.model).base_model
        options = {"only_pooled": True} if isinstance(self.config, HfViTConfig) else {}

        def compute(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            return {"features": encoder(**model_inputs(batch), **options).pooler_output.flatten(1).float()}

        return collect(self.accelerator, self.model, batches, compute)

    @torch.no_grad()
    def solve(self, features: TrainingFeatures) -> tuple[float, dict[str, Any]]:
        """Set the head to the solution; return its regularization and the leave-one-out accuracy."""
        scale = None
        if self.config.problem_type == "regression":
            scale = TargetScale(features.labels.double().numpy(), names_of(self.config))
            targets = scale.standardize(features.labels.double())
        else:
            targets = class_targets(features.labels, self.config.num_labels)
        views = self.settings.views
        solver = LeastSquares(features.values, targets, views)
        l2 = solver.choose_l2() if self.settings.l2_reg == AUTO else float(self.settings.l2_reg)
        head: nn.Linear = self.accelerator.unwrap_model(self.model).classifier
        weight, bias = solver.linear(l2)
        if scale is not None:
            weight, bias = scale.fold(weight, bias)
        head.weight.copy_(weight)
        head.bias.copy_(bias)
        if scale is not None:
            errors = (solver.leave_one_out(l2) - targets)[::views]  # of the images themselves; targets have variance 1
            return l2, {"leave_one_out_r2": 1 - errors.square().mean().item()}
        if features.labels.ndim > 1:
            return l2, {}
        right = (solver.leave_one_out(l2).argmax(dim=1) == features.labels)[::views]
        return l2, {"leave_one_out_accuracy": right.double().mean().item()}

    def evaluate(self) -> dict[str, float]:
        """Return the metrics on the images for evaluation; {} without any."""
        if self.eval_split is None:
            return {}
        batches = EvaluationBatches(self.settings, self.eval_split, self.processor, self.config, self.accelerator)
        place = self.accelerator, self.model, batches
        if self.eval_split.targets:
            self.predictions, metrics = evaluate_regression(*place, names_of(self.config))
        else:
            self.predictions, metrics = evaluate_classifier(*place, self.settings.loss, self.config)
        return metrics
