"""Front matter of a card, and results in the formats of the Hub."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, EvalResultEntry, ModelCardData, constants, eval_result_entries_to_yaml

from ..catalog import released_facts
from ..models.utils import HUB_NAME
from .card_sources import Sources

_OURS = ("library_name", "pipeline_tag", "model-index")  # the README's own values of other fields are kept
_ACCURACIES = ("accuracy", "top1", "top_1", "eval_accuracy")  # its names in training and in Trainer


def render_metadata(
    sources: Sources, name: str, own: Mapping[str, Any], license: str | None, tags: Sequence[str]
) -> dict[str, Any]:
    """Return the front matter; fields of the README are kept, except those that follow from the model."""
    names = released_facts()["datasets"]
    data_sets = [
        names[key]["hub"] if key in names else key for key in sources.data_sets if key in names or _on_hub(key)
    ]
    base_model = sources.training.get("base_model") or ""
    ours = ModelCardData(
        license=license or own.get("license") or sources.facts.get("license"),
        # The Hub shows this library's code snippet; transformers alone cannot load our folders without their code.
        library_name="transformers" if sources.is_of_transformers or "auto_map" in sources.config else "hf_vit",
        pipeline_tag="image-classification" if sources.classifies else "image-feature-extraction",
        tags=_union(own.get("tags"), ["hf_vit", "bit" if sources.is_bit else "vit", "vision", *tags]),
        datasets=_union(own.get("datasets"), filter(None, data_sets)) or None,
        base_model=base_model if _on_hub(base_model) else None,
        model_name=name.split("/")[-1],
        eval_results=_eval_results(sources, name) or None,
    ).to_dict()
    kept = {field: value for field, value in own.items() if field not in (*_OURS, *ours) or field == "base_model"}
    return {**ours, **kept}


def _on_hub(name: str) -> bool:
    """Return whether a name can be a name on the Hub: it has the form owner/name, and is not a local folder."""
    return HUB_NAME.fullmatch(name) is not None and not Path(name).exists()


def _union(own: str | Sequence[str] | None, ours: Iterable[str]) -> list[str]:
    return list(dict.fromkeys([*([own] if isinstance(own, str) else own or []), *ours]))


def metadata_yaml(metadata: Mapping[str, Any]) -> str:
    """Return the front matter as YAML, without the lines of dashes around it."""
    return yaml.safe_dump(dict(metadata), sort_keys=False, allow_unicode=True, width=120)


def _eval_results(sources: Sources, name: str) -> list[EvalResult]:
    """Return the accuracies of the model for `model-index`: the authors' first one of each data set, and our run's."""
    results = {}
    for row in sources.facts.get("results", ()):
        data = released_facts()["datasets"][row["dataset"]]
        if "of" not in row and sources.classifies:
            results.setdefault(
                row["dataset"],
                EvalResult(
                    task_type="image-classification",
                    dataset_type=data["hub"] or row["dataset"],
                    dataset_name=data["name"],
                    metric_type=row["metric"],
                    metric_value=row["value"],
                    metric_name=f"{row['metric']} (%)",
                    source_name=f"{row['source']['name']}, {row['table']}",
                    source_url=row["source"]["url"],
                ),
            )
    return [*results.values(), *_own_results(sources, name)]


def _own_results(sources: Sources, name: str) -> list[EvalResult]:
    data = sources.training.get("dataset")
    return [
        EvalResult(
            task_type="image-classification",
            dataset_type=data if _on_hub(data) else Path(data).name,
            dataset_name=Path(data).name,
            dataset_split=sources.training.get("eval_split"),
            metric_type="accuracy",
            metric_value=value,
            metric_name="accuracy",
            source_name="measured by hf_vit after training",
            source_url=f"{constants.ENDPOINT}/{name}",
        )
        for metric, value in (sources.training.get("metrics") or {}).items()
        if metric in _ACCURACIES and data
    ]


def eval_results_file(texts: Mapping[str, str], name: str, task_of: Callable[[str], str | None]) -> str | None:
    """Return the text of `.eval_results/hf_vit.yaml` for the Hub; None without a result on one of its benchmarks.

    Args:
        task_of: function of a data set's name that returns its task, or None if it is not a benchmark.
    """
    entries = [
        EvalResultEntry(
            dataset_id=result.dataset_type,
            task_id=task,
            value=result.metric_value,
            source_url=result.source_url,
            source_name=result.source_name,
            notes=result.metric_name,
        )
        for result in _eval_results(Sources(texts), name)
        if HUB_NAME.fullmatch(result.dataset_type) and (task := task_of(result.dataset_type)) is not None
    ]
    return yaml.safe_dump(eval_result_entries_to_yaml(entries), sort_keys=False) if entries else None
