"""Few-shot evaluation: the solution compared with numpy's solver, the draw, and the whole protocol."""

import json

import numpy as np
import pytest
import torch

from hf_vit.evaluation.features import BIAS, EPSILON, LeastSquares, draw
from hf_vit.scripts.evaluate import evaluate

from ..processes import arguments


def by_numpy(features: np.ndarray, labels: np.ndarray, classes: int, l2: float) -> np.ndarray:
    """Solve the normal equations in float64, by the definition: (X^T X + l2)^-1 X^T Y."""
    inputs = (features - features.mean(axis=0)) / (features.std(axis=0) + EPSILON)
    inputs = np.concatenate([inputs, np.full((len(inputs), 1), BIAS)], axis=1)
    targets = np.where(np.eye(classes)[labels] == 1, 1.0, -1.0)
    return np.linalg.solve(inputs.T @ inputs + l2 * np.eye(inputs.shape[1]), inputs.T @ targets)


@pytest.mark.parametrize("images", [12, 70])  # fewer than features, and more
@pytest.mark.parametrize("l2", [0.5, 2.0**10])
def test_weights_equal_numpys_solver(images, l2):
    rng = np.random.default_rng(0)
    features, labels = rng.normal(3, 5, (images, 29)), np.arange(images) % 4
    features[:, 7] = 2.5  # a feature that does not vary
    solver = LeastSquares(torch.from_numpy(features), torch.from_numpy(labels), 4)
    expected = by_numpy(features, labels, 4, l2)
    np.testing.assert_allclose(solver.weights(l2).numpy(), expected, rtol=1e-8, atol=1e-9)


def test_the_draw_equals_big_vision():
    """`rng = default_rng(seed)`, then for each class in turn `rng.permutation` of its images."""
    labels = np.array([1, 0, 1, 1, 0, 2, 2, 1])
    rng = np.random.default_rng(2)
    expected = [rng.permutation([1, 4]), rng.permutation([0, 2, 3, 7]), rng.permutation([5, 6])]
    for found, wanted in zip(draw(labels, 3, seed=2), expected, strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_few_shot_protocol(tiny, colors, tmp_path):
    settings = {"model": tiny, "dataset": colors, "num_workers": 0, "eval_batch_size": 5, "output_dir": tmp_path}
    results = evaluate(arguments(**settings, protocol="few_shot", shots="2,6", l2_reg="[1, 1024]", seeds=3))
    assert [(row["shots"], row["l2_reg"]) for row in results["few_shot"]] == [(2, 1), (2, 1024), (6, 1), (6, 1024)]
    assert (results["samples"], results["skipped"]) == (14, 1)
    for row in results["few_shot"]:
        assert row["accuracy"] == pytest.approx(np.mean(row["accuracy_of_seeds"]))
        assert row["spread"] == [min(row["accuracy_of_seeds"]), max(row["accuracy_of_seeds"])]
        assert row["accuracy"] > 0.9
    assert json.loads((tmp_path / "few_shot.json").read_text()) == results


def test_too_few_images_are_refused(tiny, colors):
    for shots, name in (("[1, 9]", "blue"), ("0", "shots")):
        with pytest.raises(ValueError, match=name):
            evaluate(arguments(model=tiny, dataset=colors, protocol="few_shot", shots=shots, num_workers=0))


@pytest.mark.slow
def test_flowers_with_the_real_tiny_vit(shared, tmp_path):
    """Independent code: 1 shot 93.5%, 5 shots 98.5%, 10 shots 98.9%, 25 shots 99.3%, means of 3 seeds."""
    import zipfile

    from hf_vit.conversion import convert_to_folder

    convert_to_folder(shared / "weights" / "Ti_16-imagenet2012-res_224.npz", tmp_path / "ti16")
    with zipfile.ZipFile(shared / "data" / "flowers12" / "flowers12.zip") as archive:
        archive.extractall(tmp_path / "flowers")
    settings = {"model": tmp_path / "ti16", "dataset": tmp_path / "flowers", "num_workers": 0}
    chosen = {"features": "class_token", "preset": "transformers", "shots": "1,5"}
    results = evaluate(arguments(**settings, **chosen, protocol="few_shot"))
    for row, expected in zip(results["few_shot"], (0.935, 0.985), strict=True):
        assert row["spread"][0] <= expected + 0.001
        assert expected - 0.001 <= row["spread"][1]
        assert row["accuracy"] == pytest.approx(expected, abs=0.006)  # an image of 180
