"""Report of `hf-vit inspect`: an HTML file with a model's weights, and its attention and predictions for images."""

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tqdm import tqdm

from ..files.download import fetch_image
from ..files.output import check_no_model, new_folder, refuse_inputs, write_json
from ..files.pages import data_uri, render_page
from ..files.predictions import ClassRule, Prediction
from ..models.compute import Compute, count_compute
from ..models.image_processing_hf_vit import HfViTImageProcessor
from ..models.relevance import visible_image
from ..models.scores import score_function, scores_of, stored_thresholds
from . import figures
from .attention import (
    UnsupportedModel,
    as_images,
    attention_distance,
    attention_maps,
    attention_rollout,
    check_weights,
)
from .explanation import class_index, faithfulness, relevance
from .weights import embedding_filters, position_similarity

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_TOP_K = 5
# Fields of the configuration in the report.
_FIELDS = ("image_size", "patch_size", "num_hidden_layers", "num_attention_heads", "hidden_size", "intermediate_size")
_FIELDS += ("stem_depths", "depths", "embedding_size", "pooling", "representation_size", "attention_axes")
_FIELDS += ("position_embedding_type", "position_embedding_placement")
# Figures of the whole model, by the heading of their section.
_SECTIONS = {
    "Attention distance": "attention_distance.png",
    "Position embeddings": "position_similarity.png",
    "Filters": "filters.png",
}


def inspect(
    model: Any,
    processor: Any,
    images: Sequence[str | os.PathLike],
    output: str | os.PathLike,
    *,
    title: str,
    targets: Sequence[str] = (),
    overwrite: bool = False,
) -> list[str]:
    """Write figures of a model, and report.html with all of them.

    Args:
        model, processor: of this package, for the same image size.
        images: paths of image files; without any, the report shows only the weights.
        output: path of the folder, which is written completely or not at all.
        title: title of the report, such as the name of the model's folder.
        targets: names of classes, whose relevance is drawn for each image; faithfulness.json has the areas of deletion
            and insertion, next to those of rollout and of a random order.
        overwrite: replace an existing folder.

    Returns:
        A sentence for each problem, such as an unreadable image or weights that are NaN. The report has the rest.

    Raises:
        FileExistsError: `output` exists and may not be overwritten, or holds a model.
        ValueError: there is no image processor, or one of another package; or there is no such class.
    """
    if not isinstance(processor, HfViTImageProcessor):
        raise ValueError(f"cannot inspect {title}: it has no hf_vit image processor; save one next to the model")
    for target in targets:
        class_index(model.config, target)
    refuse_inputs(output, *images)
    check_no_model(output)
    with new_folder(output, overwrite) as temporary:
        report = _Report(temporary)
        compute = count_compute(model)
        _draw_weights(report, model)
        findings = _analyze_images(report, model, processor, images, targets)
        html = render_page(
            "hf_vit.analysis",
            "report.html.jinja",
            title=title,
            subtitle=f"{type(model).__name__}, {model.num_parameters():,} parameters",
            about=_about(model, processor, compute),
            compute=compute,
            images=findings,
            in_percent=score_function(model.config) != "none",
            sections=_SECTIONS,
            report=report,
        )
        (temporary / "report.html").write_text(html, encoding="utf-8")
    return report.problems


class _Report:
    """Pictures and problems of a report; a part that fails does not stop the others."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.pictures: dict[str, dict[str, str]] = {}  # by file: its caption and its data: URI
        self.missing: list[str] = []  # parts that the model does not have
        self.problems: list[str] = []

    @contextmanager
    def attempt(self, what: str = "") -> Iterator[None]:
        """Turn an error of the block into a sentence of the report, which begins with `what`."""
        try:
            yield
        except UnsupportedModel as error:
            if str(error) not in self.missing:
                self.missing.append(str(error))
        except (ValueError, OSError) as error:
            sentence = " ".join(str(error).split())
            self.problems.append(sentence if what in sentence else f"{what}: {sentence}")

    def add(self, file: str, figure: "Figure", caption: str) -> str:
        """Save a figure as a file, keep it for the page, and return the file's name."""
        figure.savefig(self.folder / file)
        self.pictures[file] = {"caption": caption, "data": data_uri("png", (self.folder / file).read_bytes())}
        return file


def _draw_weights(report: _Report, model: Any) -> None:
    """Draw the filters and the position embeddings."""
    with report.attempt("filters"):
        figure = figures.plot_embedding_filters(embedding_filters(model))
        caption = "Principal components of the first kernels, in the order of explained variance; gray is zero."
        report.add(_SECTIONS["Filters"], figure, caption)
    with report.attempt("position similarity"):
        figure = figures.plot_position_similarity(position_similarity(model))
        caption = "Each map compares the position embedding of one patch, marked +, with those of all patches."
        report.add(_SECTIONS["Position embeddings"], figure, caption)


def _analyze_images(
    report: _Report, model: Any, processor: Any, images: Sequence[str | os.PathLike], targets: Sequence[str]
) -> list[dict[str, Any]]:
    """Analyze each image separately; the attention distance is the mean over the readable images.

    Returns:
        For each readable image its "name", "predictions" and the "files" of its figures.
    """
    findings, distances = [], []
    areas: dict[str, dict[str, Any]] = {}  # of the curves of deletion and insertion, by image and class
    with report.attempt():
        check_weights(model)
        for number, path in enumerate(tqdm(images, unit="image", disable=None, leave=False), start=1):
            with report.attempt(str(path)):
                pixel_values = as_images(processor([fetch_image(str(path))], return_tensors="pt"), model.config)
                files = []
                findings.append({"name": Path(path).name, "predictions": _predict(model, pixel_values), "files": files})
                distances.append(attention_distance(model, pixel_values))
                name = re.sub(r"[^A-Za-z0-9._-]+", "_", Path(path).stem)[:40]
                for kind, figure, caption in _draw_image(model, processor, pixel_values):
                    files.append(report.add(f"{number:02d}-{name}.{kind}.png", figure, caption))
                for target in targets:
                    found = faithfulness(model, pixel_values, target)
                    areas.setdefault(str(path), {})[target] = as_numbers(found)
                    kind = f"relevance-{class_index(model.config, target)}"
                    figure, caption = _draw_relevance(model, processor, pixel_values, target, found)
                    files.append(report.add(f"{number:02d}-{name}.{kind}.png", figure, caption))
    if areas:
        write_json(report.folder / "faithfulness.json", {"images": areas, "mean": mean_areas(areas)})
    if distances:
        figure = figures.plot_attention_distance(np.mean(distances, axis=0), len(distances))
        caption = (
            "Distance between a patch and the patches it attends to, weighted by attention; a point for each head."
        )
        report.add(_SECTIONS["Attention distance"], figure, caption)
    return findings


def _draw_image(model: Any, processor: Any, pixel_values: torch.Tensor) -> Iterator[tuple[str, "Figure", str]]:
    """Yield (kind, figure, caption) of the figures of one image."""
    visible = visible_image(pixel_values[0], processor)
    (rollout,) = attention_rollout(model, pixel_values)
    caption = "Attention rollout: the share of each patch in the head's input, through all layers."
    yield "rollout", figures.plot_attention_rollout(visible, rollout), caption
    last_layer = attention_maps(model, pixel_values)[0, -1]
    query = "the class token" if model.config.num_prefix_tokens else "the mean of all patches"
    figure = figures.plot_attention_maps(visible, last_layer, "Attention of the last layer")
    yield "heads", figure, f"Last layer: attention of {query}, for each head."


def _draw_relevance(
    model: Any, processor: Any, pixel_values: torch.Tensor, target: str, areas: dict[str, dict[str, np.ndarray]]
) -> tuple["Figure", str]:
    """Return the figure of an image's relevance for a class, and its caption with the areas of deletion."""
    (found,) = relevance(model, pixel_values, target)
    compared = ", ".join(f"{name} {curves['deletion'].item():.3f}" for name, curves in areas.items())
    caption = f"Relevance for {target}. Area of deletion, lower is more faithful: {compared}."
    figure = figures.plot_attention_rollout(visible_image(pixel_values[0], processor), found, f"Relevance for {target}")
    return figure, caption


def as_numbers(areas: dict[str, dict[str, np.ndarray]]) -> dict[str, dict[str, float]]:
    """Return the areas of one image as numbers."""
    return {name: {kind: area.item() for kind, area in curves.items()} for name, curves in areas.items()}


def mean_areas(areas: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return the mean areas over all images and classes."""
    pairs = [found for of_image in areas.values() for found in of_image.values()]
    return {
        name: {kind: float(np.mean([found[name][kind] for found in pairs])) for kind in curves}
        for name, curves in pairs[0].items()
    }


@torch.inference_mode()
def _predict(model, pixel_values: torch.Tensor) -> list[Prediction]:
    """Return the most likely classes of one image; none if the model does not classify images."""
    if not hasattr(model, "classifier") or getattr(model.config, "pooling", None) == "none":
        return []
    logits = model(pixel_values.to(model.device), interpolate_pos_encoding=True).logits.float()
    rule = ClassRule(model.config.id2label, stored_thresholds(model.config), _TOP_K)
    return rule.classes(logits.cpu().numpy(), scores_of(logits, model.config).cpu().numpy())[0]


def _about(model, processor, compute: Compute) -> dict[str, str]:
    config, record = model.config, model.conversion_record or {}
    about = {name.replace("_", " "): getattr(config, name, None) for name in _FIELDS}
    about |= {
        "classes": config.num_labels if hasattr(model, "classifier") else None,
        "preprocessing": processor.preset,
        "converted from": Path(record["source"]).name if "source" in record else None,
        "for training": f"{compute.activation_bytes / 2**20:.1f} MiB of activations per image in float32",
    }
    return {name: str(value) for name, value in about.items() if value is not None}
