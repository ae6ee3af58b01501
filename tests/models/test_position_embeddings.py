import numpy as np
import pytest
import scipy.ndimage
import torch

from hf_vit.models.position_embeddings import resize_position_embeddings


def cases(goldens):
    with np.load(goldens / "posemb_resize.npz") as arrays:
        for name in {key.split("/")[0] for key in arrays.files}:
            kind, sizes = name.split("_")
            old, new = map(int, sizes.split("to"))
            yield int(kind == "cls"), old, new, arrays[f"{name}/in"], arrays[f"{name}/out"]


def test_jax_exact_equals_the_original_with_its_fault(goldens):
    for has_cls, old, new, given, expected in cases(goldens):
        ours = resize_position_embeddings(torch.from_numpy(given), (old, old), (new, new), has_cls, "jax_exact")
        np.testing.assert_allclose(ours.numpy(), expected, rtol=0, atol=1e-6, err_msg=f"{old} to {new}")


def test_jax_differs_from_the_original_only_in_the_rows_that_it_zeroes(goldens):
    repaired = []
    for has_cls, old, new, given, expected in cases(goldens):
        ours = resize_position_embeddings(torch.from_numpy(given), (old, old), (new, new), has_cls, "jax").numpy()
        wrong = np.abs(ours - expected).max(axis=-1)[0, has_cls:].reshape(new, new) > 1e-6
        assert not wrong[:-1, :-1].any()
        if wrong.any():
            assert wrong[-1].all()
            assert wrong[:, -1].all()
            corner_in, corner_out = given[0, -1], ours[0, -1]
            np.testing.assert_allclose(corner_out, corner_in, atol=1e-6)
            repaired.append((old, new))
    assert sorted(repaired) == [(8, 26), (28, 14), (28, 48)]


@pytest.mark.parametrize(("old", "new"), [((2, 8), (5, 3)), ((7, 12), (12, 7)), ((1, 6), (4, 9))])
def test_jax_equals_scipy_on_grids_that_are_not_square(old, new):
    table = np.random.default_rng(0).normal(size=(1, 2 + old[0] * old[1], 5))
    ours = resize_position_embeddings(torch.from_numpy(table), old, new, num_prefix_tokens=2)
    grid = scipy.ndimage.zoom(table[0, 2:].reshape(*old, 5), (new[0] / old[0], new[1] / old[1], 1), order=1)
    np.testing.assert_array_equal(ours[0, :2], table[0, :2])
    np.testing.assert_allclose(ours[0, 2:], grid.reshape(-1, 5), atol=1e-12)


def test_half_precision_is_resampled_in_float32():
    table = torch.randn(1, 12, 7, dtype=torch.bfloat16)
    ours = resize_position_embeddings(table, (3, 4), (7, 5), 0)
    expected = resize_position_embeddings(table.float(), (3, 4), (7, 5), 0)
    assert ours.dtype == torch.bfloat16
    torch.testing.assert_close(ours, expected.bfloat16(), rtol=0, atol=0)


def test_torchvisions_positions():
    """`interpolate_embeddings` of torchvision: bicubic with aligned corners; made with torch's own interpolation."""
    torch.manual_seed(0)
    table = torch.randn(1, 1 + 4 * 4, 6)
    grid = table[:, 1:].permute(0, 2, 1).reshape(1, 6, 4, 4)
    resized = torch.nn.functional.interpolate(grid, size=7, mode="bicubic", align_corners=True)
    expected = torch.cat([table[:, :1], resized.reshape(1, 6, 49).permute(0, 2, 1)], dim=1)
    found = resize_position_embeddings(table, (4, 4), (7, 7), 1, "bicubic_aligned")
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
