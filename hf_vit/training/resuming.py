"""Save and resume a training run."""

from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list

from ..data.fingerprint import describe_fingerprint
from . import checkpoints
from .checkpoints import Checkpoints
from .devices import is_xla, on_cpu
from .objectives import MaskedPatches
from .run import Run
from .schedules import build_schedule
from .settings import TrainingSettings

# Settings that a resumed run may change, because they do not affect the weights.
FREE_ON_RESUME = frozenset(
    "print_config resume overwrite output_dir num_workers num_processes log_every eval_every save_every "
    "keep_checkpoints report_to eval_batch_size per_device_batch_size find_batch_size profile stall_timeout "
    "early_stopping".split()
)


def save(run: Run) -> None:
    """Start writing a checkpoint in the background; every process must call it.

    Raises:
        OSError: the previous checkpoint could not be written.
    """
    tensors = checkpoints.run_tensors(*_holders(run))
    if is_xla(run.accelerator):  # each process has all tensors, and torch.distributed is not initialised
        if run.accelerator.is_main_process:
            run.checkpoints.save(run.step, on_cpu(tensors), _state_of(run))
    else:
        run.checkpoints.save(run.step, tensors, _state_of(run))


def _holders(run: Run) -> tuple[torch.nn.Module, torch.optim.Optimizer, dict[str, torch.Tensor] | None]:
    """Holders of a checkpoint's tensors: the model, the optimiser, and the averages if any."""
    average = run.average.parameters if run.average is not None else None
    return run.accelerator.unwrap_model(run.model), run.optimizer.optimizer, average


def _state_of(run: Run) -> dict[str, Any]:
    """Content of a checkpoint's state.json."""
    scaler = run.accelerator.scaler
    return {
        "step": run.step,
        "best": run.best,
        "skipped": run.skipped,
        "num_steps": run.num_steps,
        "precision": run.accelerator.mixed_precision,
        "shares": {"processes": run.shares.processes, "per_device_batch_size": run.shares.per_device},
        "settings": asdict(run.settings),
        "identity": run.identity,
        "scaler": scaler.state_dict() if scaler is not None else None,
        "history": run.history,
    }


def resume(run: Run) -> bool:
    """Restore the run from its newest intact checkpoint; without one it starts from the beginning.

    Returns:
        True if there was one.

    Raises:
        ValueError: all checkpoints are damaged; or settings, data or the initial model differ from the checkpoint's,
            and the message lists the differences.
    """
    path = _newest(run)
    if path is None:
        run.accelerator.print(
            f"There is no checkpoint in {run.checkpoints.folder}: training starts from the beginning."
        )
        return False
    state = checkpoints.read_state(path)
    _refuse_differences(state, run)
    if "identity" not in state:
        run.accelerator.print(f"{path} does not record its training data: they are assumed to be the same.")
    checkpoints.restore(path, *_holders(run))
    if run.accelerator.scaler is not None and state["scaler"]:
        run.accelerator.scaler.load_state_dict(state["scaler"])
    run.step, run.best, run.skipped, run.history = (state[name] for name in ("step", "best", "skipped", "history"))
    run.accelerator.print(f"Resuming from {path} at step {run.step} of {run.num_steps}.")
    return True


def _newest(run: Run) -> Path | None:
    """Newest intact checkpoint; the first process looks, moves newer ones aside, and tells the others.

    Raises:
        ValueError: there are checkpoints, but all are damaged.
    """
    found: list[Any] = [None, {}]
    if run.accelerator.is_main_process:
        path, damaged = run.checkpoints.newest()
        for bad, problem in damaged.items() if path else ():
            moved = checkpoints.set_aside(bad)
            run.accelerator.print(f"{bad} is damaged ({problem}) and was moved to {moved}; {path} is used")
        found = [path and str(path), {bad.name: problem for bad, problem in damaged.items()}]  # XLA takes no Path
    name, damaged = broadcast_object_list(found)
    if damaged and not name:
        listed = "; ".join(f"{bad}: {problem}" for bad, problem in damaged.items())
        raise ValueError(
            f"cannot resume: every checkpoint in {run.checkpoints.folder} is damaged ({listed}); restore one of them, "
            "or choose another --output-dir to train from the beginning"
        )
    return name and Path(name)


def with_new_defaults(saved: dict[str, Any], settings_class: type[TrainingSettings]) -> dict[str, Any]:
    """Add to saved settings the defaults of settings that did not exist yet.

    Before there was token_drop, the preset native was one of the evaluation alone.
    """
    defaults = settings_class()
    if saved.get("preset") == "native" and "token_drop" not in saved:
        saved = {**saved, "preset": "native in the evaluation only"}
    return {**{name: value for name, value in asdict(defaults).items() if name not in FREE_ON_RESUME}, **saved}


def saved_per_device(folder: Path) -> int | None:
    """Return the images per forward of the run with checkpoints in `folder`; None without checkpoints."""
    for path in reversed(Checkpoints(folder, keep=1).paths()):
        with suppress(OSError, ValueError, TypeError, KeyError):  # a damaged one
            return int(checkpoints.read_state(path)["shares"]["per_device_batch_size"])
    return None


def _refuse_differences(saved: dict[str, Any], run: Run) -> None:
    """Raise ValueError if anything that affects the result differs from the checkpoint."""
    current = _state_of(run)
    before = _fixed({**saved, "settings": with_new_defaults(saved["settings"], type(run.settings))})
    differences = [
        f"{name} was {before.get(name)} and is {value}"
        for name, value in _fixed(current).items()
        if before.get(name) != value
    ]
    if (precision := saved.get("precision", current["precision"])) != current["precision"]:
        differences.append(f"the mixed precision was {precision} and is {current['precision']}")
    differences += _differing_shares(saved["shares"], current["shares"], run) + _differing_length(saved, run)
    if differences:
        raise ValueError(f"cannot resume with other settings: {'; '.join(differences)}")
    changed = [
        f"the {what} was {describe_fingerprint(identity)} and is {describe_fingerprint(current['identity'][what])}"
        for what, identity in saved.get("identity", {}).items()
        if identity != current["identity"].get(what)
    ]
    if changed:
        raise ValueError(f"cannot resume with other data or another model: {'; '.join(changed)}")


def _fixed(state: dict[str, Any]) -> dict[str, Any]:
    """Settings that must be equal in a checkpoint and the resumed run."""
    free = {*FREE_ON_RESUME, "steps", "epochs"}
    return {name: value for name, value in state["settings"].items() if name not in free}


def _differing_shares(before: dict[str, int], now: dict[str, int], run: Run) -> list[str]:
    """Differences in the division of a step among processes, if they affect the result."""
    compared = set(now)
    draws = _draws_by_micro_batch(run)
    if not draws:
        compared.remove("per_device_batch_size")
    if not (draws and run.settings.streaming):  # images of shards are distributed over processes one by one
        compared.remove("processes")
    return [f"{name} was {before[name]} and is {now[name]}" for name in sorted(compared) if now[name] != before[name]]


def _draws_by_micro_batch(run: Run) -> bool:
    """Tell whether random numbers are drawn per micro-batch, or images of a micro-batch are mixed."""
    config: Any = run.accelerator.unwrap_model(run.model).config
    rates = ("hidden_dropout_prob", "attention_probs_dropout_prob", "drop_path_rate")
    dropout = any(getattr(config, name, 0) for name in rates)
    mixes = run.settings.mixup_alpha or run.settings.cutmix_alpha
    return bool(dropout or mixes or isinstance(run.objective, MaskedPatches))


def _differing_length(saved: dict[str, Any], run: Run) -> list[str]:
    """Difference in the number of steps, if it changes the learning rates of the steps already taken."""
    before, now, done = saved["num_steps"], run.num_steps, saved["step"]
    if now == before:
        return []
    sentence = f"the number of steps was {before} and is {now}"
    if now < done:
        return [f"{sentence}, but {done} are already done"]
    earlier = build_schedule(run.settings, before)
    if all(earlier(step) == run.schedule(step) for step in range(done)):
        return []
    return [f"{sentence}, which changes the learning rates of steps already taken (except with --decay-steps)"]
