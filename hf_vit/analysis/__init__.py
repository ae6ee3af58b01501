"""Analysis of a model: filters, positions, attention and compute.

Functions that analyze a model return NumPy arrays; the `plot_` functions draw these with matplotlib.
"""

from typing import NoReturn

from ..files.removed_names import refuse_removed
from ..models.compute import Compute, Part, count_compute
from .attention import attention_distance, attention_maps, attention_rollout
from .compute import Run, accelerator_days, load_config, published_runs, read_runs, training_exaflops
from .explanation import faithfulness, relevance
from .figures import (
    plot_attention_distance,
    plot_attention_maps,
    plot_attention_rollout,
    plot_compute_accuracy,
    plot_embedding_filters,
    plot_levels,
    plot_lines,
    plot_position_similarity,
)
from .weights import embedding_filters, position_similarity

__all__ = [
    "Compute",
    "Part",
    "Run",
    "accelerator_days",
    "attention_distance",
    "attention_maps",
    "attention_rollout",
    "count_compute",
    "embedding_filters",
    "faithfulness",
    "load_config",
    "plot_attention_distance",
    "plot_attention_maps",
    "plot_attention_rollout",
    "plot_compute_accuracy",
    "plot_embedding_filters",
    "plot_levels",
    "plot_lines",
    "plot_position_similarity",
    "position_similarity",
    "published_runs",
    "read_runs",
    "relevance",
    "training_exaflops",
]


def __getattr__(name: str) -> NoReturn:
    refuse_removed(__name__, name)
