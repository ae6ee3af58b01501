"""Saving a training run and going on from where it was saved."""

from dataclasses import asdict
from typing import Any

from . import checkpoints
from .identity import describe
from .run import Run
from .settings import TrainingSettings

# Settings that a resumed run may change: they do not change the weights.
FREE_ON_RESUME = frozenset(
    "print_config resume overwrite output_dir num_workers num_processes log_every eval_every save_every "
    "keep_checkpoints report_to eval_batch_size per_device_batch_size find_batch_size".split()
)


def save(run: Run) -> None:
    """Write a checkpoint; every process takes part, since weights may be spread over them."""
    model = run.accelerator.unwrap_model(run.model)
    optimizer = checkpoints.optimizer_tensors(model, run.optimizer.optimizer)
    groups = {"model": checkpoints.model_tensors(model), "optimizer": optimizer}
    if run.average is not None:
        groups["average"] = {name: checkpoints.whole(tensor) for name, tensor in run.average.parameters.items()}
    if run.accelerator.is_main_process:
        run.checkpoints.write(run.step, groups, _state_of(run))
    run.accelerator.wait_for_everyone()


def _state_of(run: Run) -> dict[str, Any]:
    """What a checkpoint holds besides tensors."""
    scaler = run.accelerator.scaler
    return {
        "step": run.step,
        "best": run.best,
        "skipped": run.skipped,
        "num_steps": run.num_steps,
        "shares": {"processes": run.shares.processes, "per_device_batch_size": run.shares.per_device},
        "settings": asdict(run.settings),
        "identity": run.identity,
        "scaler": scaler.state_dict() if scaler is not None else None,
        "history": run.history,
    }


def resume(run: Run) -> None:
    """Restore the run from its newest intact checkpoint; without one it starts from the beginning.

    Raises:
        ValueError: when settings, data or the model to begin from differ, naming each difference.
    """
    path, complaints = run.checkpoints.newest()
    for complaint in complaints:
        run.accelerator.print(complaint)
    if path is None:
        run.accelerator.print(
            f"There is no checkpoint in {run.checkpoints.folder}: training starts from the beginning."
        )
        return
    groups, state = checkpoints.read(path)
    _refuse_differences(state, _state_of(run), type(run.settings))
    if "identity" not in state:
        run.accelerator.print(f"{path} does not say which data it was trained on: they are taken to be the same.")
    model = run.accelerator.unwrap_model(run.model)
    checkpoints.restore_model(model, groups["model"])
    checkpoints.restore_optimizer(model, run.optimizer.optimizer, groups["optimizer"])
    if run.average is not None:
        for name, tensor in run.average.parameters.items():
            tensor.copy_(checkpoints.placed_like(groups["average"][name], tensor))
    if run.accelerator.scaler is not None and state["scaler"]:
        run.accelerator.scaler.load_state_dict(state["scaler"])
    run.step, run.best, run.skipped, run.history = (state[name] for name in ("step", "best", "skipped", "history"))
    run.accelerator.print(f"Resuming from {path} at step {run.step} of {run.num_steps}.")


def with_new_defaults(saved: dict[str, Any], settings_class: type[TrainingSettings]) -> dict[str, Any]:
    """Settings that were saved, with the defaults of those that did not exist then."""
    defaults = settings_class()
    return {**{name: value for name, value in asdict(defaults).items() if name not in FREE_ON_RESUME}, **saved}


def _refuse_differences(saved: dict[str, Any], current: dict[str, Any], settings_class: type[TrainingSettings]) -> None:
    """A run resumes with the settings and on the data it had, or not at all."""
    before = _fixed({**saved, "settings": with_new_defaults(saved["settings"], settings_class)})
    differences = [
        f"{name} was {before.get(name)} and is {value}"
        for name, value in _fixed(current).items()
        if before.get(name) != value
    ]
    if differences:
        raise ValueError(f"cannot resume with other settings: {'; '.join(differences)}")
    changed = [
        f"the {what} was {describe(identity)} and is {describe(current['identity'][what])}"
        for what, identity in saved.get("identity", {}).items()
        if identity != current["identity"].get(what)
    ]
    if changed:
        raise ValueError(f"cannot resume with what has changed: {'; '.join(changed)}")


def _fixed(state: dict[str, Any]) -> dict[str, Any]:
    """What a checkpoint and the run that resumes it must agree on."""
    settings = {name: value for name, value in state["settings"].items() if name not in FREE_ON_RESUME}
    return {**settings, **state["shares"], "the number of steps": state["num_steps"]}
