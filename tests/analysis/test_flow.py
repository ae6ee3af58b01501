"""Attention flow, compared with values by hand and with the solver of another library."""

import networkx
import numpy as np
import pytest
import torch

from hf_vit import analysis
from hf_vit.analysis.attention import flows_to, layer_mixing

from ..tiny_models import images, tiny


def test_flow_by_hand():
    """In the last layer the class token attends to both patches; in the first, the first patch is hard to reach."""
    last = np.array([[0.2, 0.5, 0.3], [0, 1, 0], [0, 0, 1]])
    first = np.array([[0.8, 0.1, 0.1], [0.7, 0.1, 0.2], [0, 0.1, 0.9]])
    flows = flows_to(np.array([1.0, 0, 0]), [first, last], range(2))
    np.testing.assert_allclose(flows, [0.1 + 0.1 + 0.1, 0.1 + 0.2 + 0.3], atol=1e-6)


def networkx_flow(weights, layers, target) -> float:
    graph = networkx.DiGraph()
    tokens, depth = len(weights), len(layers)
    for token in range(tokens):
        graph.add_edge("source", (depth, token), capacity=float(weights[token]))
    for index, layer in enumerate(layers):
        for query in range(tokens):
            for key in range(tokens):
                graph.add_edge((index + 1, query), (index, key), capacity=float(layer[query, key]))
    return networkx.maximum_flow_value(graph, "source", (0, target))


@pytest.mark.parametrize("fields", [{}, {"pooling": "mean"}, {"pooling": "map"}], ids=["cls", "mean", "map"])
@pytest.mark.parametrize("identity", [True, False])
def test_flow_equals_another_solver(fields, identity):
    model = tiny(image_size=(8, 18), **fields)
    for layer in model.vit.layers:  # sharp attention, so that there are bottlenecks in the middle
        layer.attention.scaling *= 30
    pixel_values = images(model)
    found = analysis.attention_flow(model, pixel_values, identity=identity)
    assert found.shape == (2, 2, 3)
    mixing, weights, _ = next(iter(layer_mixing(model, pixel_values, identity, None, False)))
    for image in range(2):
        layers, prefix = [layer[image].double().numpy() for layer in mixing], model.config.num_prefix_tokens
        flows = [networkx_flow(weights[image].double().numpy(), layers, prefix + patch) for patch in range(6)]
        np.testing.assert_allclose(found[image].ravel(), np.array(flows) / sum(flows), atol=1e-6)


def test_a_flow_of_too_many_steps_is_refused():
    model = tiny(image_size=(160, 240), num_hidden_layers=2)
    with pytest.raises(ValueError, match="1601"):
        analysis.attention_flow(model, torch.zeros(1, 3, 160, 240))
