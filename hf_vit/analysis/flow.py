"""Attention flow: the maximum flow through the layers' attention from the head to each patch."""

from collections.abc import Collection

import numpy as np
from torch import nn
from tqdm import tqdm

from .attention import join, layer_mixing
from .attention_hooks import Images, check_finite

_UNIT = 2**24  # capacity of an attention of 1; the solver needs integers
_MAX_WORK = 3e9  # layers x tokens ** 2 x patches of an image: minutes


def attention_flow(
    model: nn.Module,
    pixel_values: Images,
    *,
    identity: bool = True,
    batch_size: int | None = None,
    progress: bool = False,
) -> np.ndarray:
    """Compute attention flow (Abnar and Zuidema, arXiv 2005.00928): attention as capacities of a network.

    The tokens at each depth are nodes. The attention between tokens of neighboring depths (mean over heads, plus the
    identity for the residual connection) is the capacity of an edge. The flow to a patch is the maximum flow between
    the head's input (see `attention_rollout`) and this patch, computed for each patch separately. If the layers mix
    well, the first layer is the bottleneck, and the flow to a patch is the attention of all tokens to it there.

    Args:
        model, pixel_values, identity, batch_size: as in `attention_rollout`.
        progress: show a progress bar.

    Returns:
        (images, rows, columns): the flows of an image divided by their sum.

    Raises:
        ImportError: scipy is not installed.
        ValueError: layers x tokens ** 2 x patches is more than 3e9; B/16 at 384 pixels has 2.3e9.
    """
    found = []
    for mixing, weights, grid in layer_mixing(model, pixel_values, identity, batch_size, False):
        patches = grid[0] * grid[1]
        work = len(mixing) * weights.shape[1] ** 2 * patches
        if work > _MAX_WORK:
            raise ValueError(
                f"cannot compute attention flow: {len(mixing)} layers of {weights.shape[1]} tokens to {patches} "
                f"patches take {work:.1e} steps (expected at most {_MAX_WORK:.0e}); use a smaller image, or "
                "attention_rollout"
            )
        for image in range(len(weights)):
            layers = [check_finite(model, layer[image].cpu().numpy()) for layer in mixing]
            bar = tqdm(range(patches), desc="flow", unit="patch", disable=not progress, leave=False)
            flows = flows_to(weights[image].cpu().numpy(), layers, bar)
            found.append((flows / flows.sum()).reshape(1, *grid))
    return join(found)


def flows_to(weights: np.ndarray, layers: list[np.ndarray], patches: Collection[int]) -> np.ndarray:
    """Compute the maximum flow to each patch.

    Nodes are a source, the tokens at the depths from the last to the first layer's output, and a sink, which is one
    patch. For each patch, only the capacities into the sink change: the patch's column of the first layer.

    Args:
        weights: (tokens,), capacities from the source to the tokens of the last depth.
        layers: capacities (tokens, tokens) of each layer, first layer first.
        patches: indices of all patches, which are the last tokens; may be a progress bar over them.
    """
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import maximum_flow

    tokens, depth = len(weights), len(layers)
    capacities = [
        _whole(weights),
        *(_whole(layer).ravel() for layer in reversed(layers[1:])),
        np.zeros(tokens, np.int32),
    ]
    sink = depth * tokens + 1
    starts = 1 + tokens * np.arange(1, depth)  # the first node of every depth but the last layer's
    targets = [np.tile(start + np.arange(tokens), tokens) for start in starts]
    targets = np.concatenate([1 + np.arange(tokens), *targets, np.full(tokens, sink)]).astype(np.int32)
    degrees = [tokens, *[tokens] * (tokens * (depth - 1)), *[1] * tokens, 0]
    ends = np.concatenate([[0], np.cumsum(degrees)]).astype(np.int32)
    edges, first_layer = np.concatenate(capacities), _whole(layers[0])
    flows = []
    for patch in patches:
        edges[-tokens:] = first_layer[:, patch - len(patches)]
        network = csr_array((edges, targets, ends), shape=(sink + 1, sink + 1))
        flows.append(maximum_flow(network, 0, sink).flow_value / _UNIT)
    return np.array(flows)


def _whole(capacities: np.ndarray) -> np.ndarray:
    return np.rint(capacities * float(_UNIT)).astype(np.int32)
