"""Search for similar images by their features."""

from collections.abc import Iterable

import numpy as np

from ..files.predictions import unit_length

ROWS_AT_ONCE = 8192  # rows of features that are compared at once


def search(
    features: np.ndarray | Iterable[np.ndarray], queries: np.ndarray, top_k: int = 5
) -> tuple[np.ndarray, np.ndarray]:
    """Find the rows that are most similar to each query, by exact cosine similarity in float64.

    Args:
        features: (images, features), or an iterable of such arrays, of which one at a time is in memory.
        queries: (queries, features), or (features,) for one query.
        top_k: number of rows to return; all if there are fewer.

    Returns:
        Row numbers and cosines, (queries, top_k) each, most similar first; equal ones in the order of rows.

    Raises:
        ValueError: `top_k` is less than 1, or the numbers of features differ.
    """
    if top_k < 1:
        raise ValueError(f"top_k is {top_k}; it must be at least 1")
    queries = unit_length(np.atleast_2d(queries).astype(np.float64))
    chunks = features
    if isinstance(features, np.ndarray):
        chunks = (features[start : start + ROWS_AT_ONCE] for start in range(0, len(features), ROWS_AT_ONCE))
    rows, cosines, seen = np.empty((len(queries), 0), np.int64), np.empty((len(queries), 0)), 0
    for chunk in chunks:
        found = queries @ unit_length(chunk.astype(np.float64)).T  # (queries, rows of the chunk)
        numbers = np.broadcast_to(np.arange(seen, seen + len(chunk)), found.shape)
        rows, cosines = np.hstack([rows, numbers]), np.hstack([cosines, found])
        best = np.argsort(-cosines, axis=1, kind="stable")[:, :top_k]
        rows, cosines = np.take_along_axis(rows, best, 1), np.take_along_axis(cosines, best, 1)
        seen += len(chunk)
    return rows, cosines
