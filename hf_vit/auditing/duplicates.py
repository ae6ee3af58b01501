"""Near duplicates: images that show the same picture after re-encoding, resizing, mirroring or cropping.

Candidates are the nearest neighbors of an image by the model's features, and by small pictures of the images and of
their mirror images. A candidate is confirmed by its pixels: one image is registered in the other (a window of it,
perhaps mirrored), and then the two and their gradients must correlate. Different pictures of one kind, such as
airplanes in a blue sky, correlate in their levels, but not in their edges.
"""

from itertools import product

import numpy as np
import torch
from torch.nn import functional as F

SIDE = 64  # pixels of the gray pictures that are compared
_COARSE = 12  # pixels of the pictures in which the window is searched
_MIN_WINDOW = 8  # of these pixels, the smallest side of a window: two thirds of the image
_PLAUSIBLE = 0.85  # correlation in the coarse window above which a pair is registered
_NEIGHBORS, _SIMILAR = 10, 3  # candidates of an image by its features, and by each of the two pictures
_STEPS = 12  # iterations of the registration
_SAMPLE, _MIN_PAIRS = 400, 100  # pairs that show how well different images of this dataset correlate
_LEVELS = 0.9  # smallest correlation of the levels of duplicates
_MIN_THRESHOLD, _MAX_THRESHOLD = 0.78, 0.97  # bounds of the smallest correlation of the gradients of duplicates
_DEVIATIONS = 8  # its distance from the correlation of different images, in standard deviations
_RELATED = 0.5  # smallest cosine of the features of duplicates
_PAIRS_AT_ONCE = 256
_ROWS_AT_ONCE, _KEYS_AT_ONCE = 1024, 16_384


def find_near_duplicates(features: torch.Tensor, pictures: torch.Tensor) -> dict[tuple[int, int], float]:
    """Return pairs of rows that show the same picture, the smaller row first, with their correlations.

    The threshold on the correlation of the gradients depends on the data, because handwritten digits resemble each
    other more than photographs: it is eight standard deviations above the correlation of different images.

    Args:
        features: (images, features)
        pictures: (images, SIDE, SIDE) gray levels
    """
    pairs = find_candidates(features, pictures)
    scores, edges = _compare(pictures, pairs)
    threshold = _MIN_THRESHOLD
    if len(pairs) >= _MIN_PAIRS:
        chosen = torch.from_numpy(np.random.default_rng(0).permutation(len(pairs))[:_SAMPLE])
        z = _compare(pictures, pairs[chosen], -1)[1].clamp(-0.999, 0.999).atanh()  # Fisher's transformation
        deviation = 1.4826 * (z - z.median()).abs().median()
        threshold = float((z.median() + _DEVIATIONS * deviation).tanh().clamp(_MIN_THRESHOLD, _MAX_THRESHOLD))
    cosines = F.cosine_similarity(features[pairs[:, 0]], features[pairs[:, 1]])
    found = ((scores >= _LEVELS) & (edges >= threshold) & (cosines >= _RELATED)).nonzero().flatten()
    return {
        (first, second): float(scores[row]) for row, (first, second) in zip(found, pairs[found].tolist(), strict=True)
    }


def find_candidates(features: torch.Tensor, pictures: torch.Tensor) -> torch.Tensor:
    """Return pairs of rows that may be duplicates: (pairs, 2), the smaller row first.

    Args:
        features: (images, features)
        pictures: (images, SIDE, SIDE) gray levels
    """
    blocks = pictures.split(_ROWS_AT_ONCE)
    small = torch.cat([F.adaptive_avg_pool2d(block.float(), 16) for block in blocks])  # (images, 16, 16)
    vectors = F.normalize(features.float(), dim=1)
    pixels = _standardize(small).flatten(1)
    mirrored = _standardize(small.flip(2)).flatten(1)
    pairs = []
    for keys, queries, count in (
        (vectors, vectors, _NEIGHBORS),
        (pixels, pixels, _SIMILAR),
        (pixels, mirrored, _SIMILAR),
    ):
        nearest = nearest_neighbors(queries, keys, count)[1]
        rows = torch.arange(len(keys))[:, None].expand_as(nearest)
        pairs.append(torch.stack([rows, nearest], dim=2).flatten(0, 1))
    return torch.cat(pairs).sort(dim=1).values.unique(dim=0)


def nearest_neighbors(queries: torch.Tensor, keys: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the `count` most similar keys of each query, without the key of its own row.

    The similarities are computed in blocks, so that memory does not grow with the square of the images.

    Args:
        queries, keys: (images, features)

    Returns:
        Similarities and rows, (images, count) each, most similar first.
    """
    count = min(count, len(keys) - 1)
    found = []
    for rows in torch.arange(len(queries)).split(_ROWS_AT_ONCE):
        values = queries.new_empty(len(rows), 0)
        indices = rows.new_empty(len(rows), 0)
        for columns in torch.arange(len(keys)).split(_KEYS_AT_ONCE):
            similarity = queries[rows] @ keys[columns].T
            similarity[rows[:, None] == columns] = -torch.inf  # the image itself
            candidates = torch.cat([values, similarity], dim=1)
            numbers = torch.cat([indices, columns.expand_as(similarity)], dim=1)
            values, best = candidates.topk(min(count, candidates.shape[1]), dim=1)
            indices = numbers.gather(1, best)
        found.append((values, indices))
    values, indices = zip(*found, strict=True)
    return torch.cat(values), torch.cat(indices)


def _compare(
    pictures: torch.Tensor, pairs: torch.Tensor, plausible: float = _PLAUSIBLE
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the correlations of each pair, of the levels and of the gradients.

    Where it is not plausible that they are duplicates, the levels are those of the coarse windows, and the gradients 0.
    """
    results = []
    for rows in pairs.split(_PAIRS_AT_ONCE):
        first, second = pictures[rows[:, 0]].float(), pictures[rows[:, 1]].float()
        whole, part = torch.cat([first, second]), torch.cat([second, first])  # either may be the cropped one
        scores, mirror, window = _find_window(whole, part)
        edges, chosen = torch.zeros_like(scores), (scores >= plausible).nonzero().flatten()
        if len(chosen):
            part = torch.where(mirror[:, None, None], part.flip(2), part)
            scores[chosen], edges[chosen] = _register(whole[chosen], part[chosen], window[chosen])
        (score, other), (edge, its_edge) = scores.chunk(2), edges.chunk(2)
        results.append((torch.maximum(score, other), torch.where(score >= other, edge, its_edge)))
    scores, edges = zip(*results, strict=True)
    return torch.cat(scores), torch.cat(edges)


def _find_window(whole: torch.Tensor, part: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Find `part`, or its mirror image, as a window of `whole`, on small copies.

    Args:
        whole, part: (pairs, SIDE, SIDE)

    Returns:
        (pairs,) correlations; (pairs,) whether it is mirrored; (pairs, 4) scale and center of the window along x and y.
    """
    pairs = len(whole)
    small = F.adaptive_avg_pool2d(whole[:, None], _COARSE).squeeze(1)
    best, mirror = torch.full((pairs,), -torch.inf), torch.zeros(pairs, dtype=torch.bool)
    window = torch.zeros(pairs, 4)
    sizes = range(_MIN_WINDOW, _COARSE + 1)
    for height, width in product(sizes, sizes):
        template = _standardize(F.interpolate(part[:, None], (height, width), mode="area").squeeze(1))
        mean, square = (F.avg_pool2d(values[:, None], (height, width), 1) for values in (small, small.square()))
        deviation = (square - mean.square()).clamp(min=1e-2).sqrt().squeeze(1) * (height * width) ** 0.5
        for flipped in (False, True):
            kernel = template.flip(2) if flipped else template
            scores = F.conv2d(small[None], kernel[:, None], groups=pairs).squeeze(0) / deviation
            values, indices = scores.flatten(1).max(dim=1)
            top, left = indices // scores.shape[2], indices % scores.shape[2]
            center = torch.stack([2 * left + width, 2 * top + height], dim=1) / _COARSE - 1
            scale = torch.tensor([width, height]).expand(pairs, 2) / _COARSE
            better = values > best
            best = torch.where(better, values, best)
            mirror = torch.where(better, flipped, mirror)
            window = torch.where(better[:, None], torch.cat([scale, center], dim=1), window)
    return best, mirror, window


def _register(whole: torch.Tensor, part: torch.Tensor, window: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Move the windows by Gauss-Newton steps to where they correlate most with `part`.

    Returns:
        (pairs,) correlations of the levels there, and of the gradients.
    """
    axis = (torch.arange(SIDE) + 0.5) / SIDE * 2 - 1
    across, along = axis.repeat(SIDE), axis.repeat_interleave(SIDE)  # x and y of each pixel
    target = _standardize(part).flatten(1)
    slopes, target_slopes = (
        [torch.gradient(pictures, spacing=2 / SIDE, dim=dim)[0] for dim in (2, 1)] for pictures in (whole, part)
    )
    source = torch.stack([whole, *slopes], dim=1)
    best, best_edges = torch.full((len(whole),), -1.0), torch.zeros(len(whole))
    for _ in range(_STEPS):
        x, y = window[:, :1] * axis + window[:, 2:3], window[:, 1:2] * axis + window[:, 3:]  # (pairs, SIDE)
        grid = torch.stack(torch.broadcast_tensors(x[:, None], y[:, :, None]), dim=3)
        sampled = F.grid_sample(source, grid, padding_mode="border", align_corners=False).flatten(2)
        levels, slope_x, slope_y = sampled.unbind(dim=1)
        levels = levels - levels.mean(dim=1, keepdim=True)
        norm = levels.norm(dim=1, keepdim=True).clamp(min=1e-6)
        correlation = (levels / norm * target).sum(dim=1)
        moved = torch.cat([slope_x * window[:, :1], slope_y * window[:, 1:2]], dim=1)  # slopes of the window
        edges = F.cosine_similarity(moved, torch.stack(target_slopes, dim=1).flatten(1))
        best, best_edges = torch.where(
            correlation > best, torch.stack([correlation, edges]), torch.stack([best, best_edges])
        )
        jacobian = torch.stack([slope_x * across, slope_y * along, slope_x, slope_y], dim=2)  # (pairs, pixels, 4)
        jacobian = (jacobian - jacobian.mean(dim=1, keepdim=True)) / norm[:, :, None]
        residual = target * correlation[:, None].clamp(min=0.1) - levels / norm
        normal = jacobian.mT @ jacobian + 1e-3 * torch.eye(4)
        step = torch.linalg.solve(normal, jacobian.mT @ residual[:, :, None]).squeeze(2)
        window = window + step.clamp(-0.1, 0.1)
        window[:, :2] = window[:, :2].clamp(0.5, 1.1)
    return best, best_edges


def _standardize(pictures: torch.Tensor) -> torch.Tensor:
    """Subtract each picture's mean and divide by its norm: (images, height, width)"""
    centered = pictures - pictures.mean(dim=(1, 2), keepdim=True)
    return centered / centered.flatten(1).norm(dim=1)[:, None, None].clamp(min=1e-6)
