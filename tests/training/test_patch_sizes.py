"""A patch size for each step: the original's sequence, errors, training and evaluation."""

import json

import pytest
import torch

from hf_vit.scripts.evaluate import evaluate
from hf_vit.scripts.pretrain import pretrain
from hf_vit.settings.fields import FinetuneSettings
from hf_vit.training.build import compile_model, prepare_patch_sizes
from hf_vit.training.objectives import draw_patch_size

from ..processes import DIGITS, MODEL, arguments
from ..tiny_models import load_model, tiny

# `choice(v, p, mkrng(-1, -1, step))` of big_vision's trainers/proj/flexi/common.py at 0127fb6, for steps 1 to 24:
# v=(5, 6, 8, 10, 12, 15, 16, 20, 24, 30) with p all 1, which its configurations have; and v=(5, 8, 10), p=(1, 2, 5).
ORIGINAL = [12, 16, 20, 30, 30, 16, 6, 6, 24, 12, 16, 20, 6, 12, 20, 6, 6, 24, 30, 24, 15, 5, 12, 15]
WEIGHTED = [10, 10, 10, 10, 10, 10, 8, 8, 10, 10, 10, 10, 8, 10, 10, 8, 8, 10, 10, 10, 10, 5, 10, 10]

RUN = {**DIGITS, "steps": 4, "warmup_steps": 0, "num_workers": 0, "patch_sizes": "4,2,8"}


def drawn(**settings) -> list[int]:
    return [draw_patch_size(FinetuneSettings(**settings), step)["patch_size"] for step in range(24)]


def test_the_sequence_is_the_originals():
    counts = [5, 6, 8, 10, 12, 15, 16, 20, 24, 30]
    assert drawn(patch_sizes=counts) == ORIGINAL
    assert drawn(patch_sizes=[240 // count for count in counts]) == [240 // count for count in ORIGINAL]
    assert drawn(patch_sizes=[5, 8, 10], patch_size_weights=[1, 2, 5]) == WEIGHTED
    assert drawn(patch_sizes=counts, seed=1) != ORIGINAL
    assert draw_patch_size(FinetuneSettings(), 3) == {}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's compiler about torch
def test_a_compiled_model_has_a_graph_for_each_of_many_patch_sizes():
    """torch.compile gives up after 8 graphs by default; Dynamo counts those that it made."""
    sizes = (1, 2, 3, 4, 5, 6, 10, 12, 15)
    model = tiny(image_size=60, patch_size=10, num_hidden_layers=1, pooling="mean", use_cls_token=False)
    prepare_patch_sizes(model, sizes)
    made, images = [], torch.randn(1, 3, 60, 60)
    with torch.compiler.config.patch(recompile_limit=torch.compiler.config.recompile_limit):
        compile_model(model, sizes)
        model.compile(backend=lambda graph, inputs: made.append(graph) or graph.forward)  # ours needs no compiler
        for size in sizes:
            model(images, patch_size=size)
    torch.compiler.reset()
    assert len(made) == len(sizes)


@pytest.mark.usefixtures("fresh_accelerator")
def test_a_run_draws_and_evaluates_patch_sizes(tmp_path):
    metrics = pretrain(arguments(**RUN, output_dir=tmp_path / "out"))
    each = [metrics[f"accuracy_at_patch_{size}"] for size in (4, 2, 8)]
    assert len(set(each)) > 1
    assert metrics["accuracy"] == pytest.approx(sum(each) / 3)
    assert metrics["samples"] == 103
    model = load_model(tmp_path / "out")
    assert (model.config.kernel_size, model.config.stored_grid, model.config.patch_size) == ((4, 4), (2, 2), 4)
    where = {"model": tmp_path / "out", "dataset": "digits", "split": "test[:103]", "num_workers": 0}
    assert evaluate(arguments(**where, patch_size=8))["accuracy"] == pytest.approx(each[2])


@pytest.mark.usefixtures("fresh_accelerator")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"patch_sizes": "4,3"}, r"\b8\b.*\b3\b"),
        ({"patch_sizes": "4,0"}, "patch_sizes"),
        ({"patch_size_weights": "1,2"}, "patch_size_weights"),
        ({"objective": "masked_patch_prediction"}, "masked_patch_prediction"),
        ({"config": json.dumps({"depths": [1], "image_size": 8})}, "HfBiTForImageClassification"),
    ],
)
def test_impossible_patch_sizes_are_refused(tmp_path, changes, message):
    assert MODEL["image_size"] == 8
    with pytest.raises((ValueError, SystemExit), match=message):
        pretrain(arguments(**{**RUN, **changes}, output_dir=tmp_path / "out"))
