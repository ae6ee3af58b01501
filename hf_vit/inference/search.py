"""Search for similar images by their features."""

from collections.abc import Iterable

import numpy as np

from ..files.predictions import unit_length

ROWS_AT_ONCE = 8192  # rows of features that are compared at once
QUERIES_AT_ONCE = 1024  # with so many queries


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
    rows = np.empty((len(queries), 0), np.int64)
    cosines = np.empty((len(queries), 0))
    seen = 0
    for chunk in chunks:
        keys = unit_length(chunk.astype(np.float64))
        width = min(top_k, seen + len(chunk))
        new_rows = np.empty((len(queries), width), np.int64)
        new_cosines = np.empty((len(queries), width))
        for start in range(0, len(queries), QUERIES_AT_ONCE):
            block = slice(start, start + QUERIES_AT_ONCE)
            found = queries[block] @ keys.T  # (queries of the block, rows of the chunk)
            if seen >= top_k:
                new_rows[block] = rows[block]
                new_cosines[block] = cosines[block]
                better = np.flatnonzero(found.max(axis=1) > cosines[block, -1])
            else:
                better = np.arange(len(found))
            numbers = np.broadcast_to(np.arange(seen, seen + len(chunk)), (len(better), len(chunk)))
            all_rows = np.hstack([rows[block][better], numbers])
            all_cosines = np.hstack([cosines[block][better], found[better]])
            best = np.argsort(-all_cosines, axis=1, kind="stable")[:, :width]
            new_rows[start + better] = np.take_along_axis(all_rows, best, 1)
            new_cosines[start + better] = np.take_along_axis(all_cosines, best, 1)
        rows = new_rows
        cosines = new_cosines
        seen += len(chunk)
    return rows, cosines
