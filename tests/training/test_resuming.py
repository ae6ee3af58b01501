"""Changes of settings on resume: allowed or refused. Resumed runs are compared with uninterrupted ones."""

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState

from hf_vit.scripts.pretrain import pretrain
from hf_vit.settings.recipes import read_recipe

from ..processes import DIGITS, arguments, weights

pytestmark = pytest.mark.usefixtures("fresh_accelerator")

SHORT = {**DIGITS, "num_workers": 0, "warmup_steps": 1, "save_every": 2, "eval_every": 100, "log_every": 2}
SHORT |= {"eval_split": "test[:20]"}


def train(output, **changes):
    pretrain(arguments(**{**SHORT, "resume": "true", "output_dir": output, **changes}))
    return weights(output)


WSD = {"schedule": "wsd", "cooldown_steps": 1, "optimizer": "muon", "class_sampling": "balanced"}


@pytest.mark.parametrize("schedule", [{"schedule": "constant"}, {"schedule": "cosine", "decay_steps": 5}, WSD])
def test_extended_run_equals_a_run_of_the_new_length(tmp_path, schedule):
    """The same command line serves every start: the first finds neither folder nor checkpoint."""
    train(tmp_path / "out", steps=2, **schedule)
    prolonged = train(tmp_path / "out", steps=4, **schedule)
    assert read_recipe(tmp_path / "out" / "recipe.yaml")["steps"] == 4
    straight = train(tmp_path / "straight", steps=4, **schedule)
    torch.testing.assert_close(prolonged, straight, rtol=0, atol=0)


def test_damaged_checkpoints_are_moved_and_never_trained_over(tmp_path):
    """The run continues from the one before them; without an intact one it is refused."""
    checkpoints = tmp_path / "out" / "checkpoints"
    straight = train(tmp_path / "out", steps=4)
    (checkpoints / "step_00000004" / "checksums.json").write_text("{}")
    torch.testing.assert_close(train(tmp_path / "out", steps=4), straight, rtol=0, atol=0)
    kept = {"step_00000002", "step_00000004", "damaged"}
    assert {path.name for path in checkpoints.iterdir()} == kept
    for path in checkpoints.glob("step_*"):
        (path / "state.json").unlink()
    with pytest.raises(ValueError, match="damaged"):
        train(tmp_path / "out", steps=4)
    assert {path.name for path in checkpoints.iterdir()} == kept
    assert (checkpoints / "damaged" / "step_00000004" / "state.json").is_file()


def test_a_number_of_steps_that_earlier_rates_depend_on_is_refused(tmp_path, monkeypatch):
    """And a precision of the launch that is not in the settings."""
    train(tmp_path / "out", steps=4)
    with pytest.raises(ValueError, match=r"4 .* 6"):
        train(tmp_path / "out", steps=6)
    with pytest.raises(ValueError, match=r"4 .* 3"):
        train(tmp_path / "out", steps=3)
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    with pytest.raises(ValueError, match="bf16"):
        train(tmp_path / "out", steps=4)


def test_images_per_forward_may_change_without_random_numbers_per_forward(tmp_path):
    """Without dropout or mixing only rounding differs; without a setting, the saved number is kept."""
    settings = {"schedule": "constant", "per_device_batch_size": 6}
    train(tmp_path / "out", steps=2, **settings)
    ours = train(tmp_path / "out", **{**settings, "steps": 4, "per_device_batch_size": 12})
    straight = train(tmp_path / "straight", steps=4, **settings)
    torch.testing.assert_close(ours, straight, rtol=0, atol=1e-6)
    settings["mixup_alpha"] = 0.2
    train(tmp_path / "mixed", steps=2, **settings)
    with pytest.raises(ValueError, match="per_device_batch_size"):
        train(tmp_path / "mixed", **{**settings, "steps": 4, "per_device_batch_size": 12})
