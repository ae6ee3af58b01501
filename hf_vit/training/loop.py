"""The training loop: optimiser steps, each of which is a function of its number and of the state before it."""

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, set_seed

from . import checkpoints
from .checkpoints import Checkpoints
from .data import Shares
from .identity import describe
from .objectives import Objective
from .optimization import MovingAverage, set_learning_rate
from .patch_sizes import draw_sizes
from .reporting import Report
from .schedules import Schedule
from .settings import TrainingSettings

# Settings that a resumed run may change: they do not change the weights.
FREE_ON_RESUME = frozenset(
    "print_config resume overwrite output_dir num_workers num_processes log_every eval_every save_every "
    "keep_checkpoints report_to eval_batch_size per_device_batch_size find_batch_size".split()
)


class TrainingStopped(RuntimeError):
    """Training cannot go on; the last checkpoint is good."""


@dataclass
class Run:
    """All there is to a training run."""

    settings: TrainingSettings
    accelerator: Accelerator
    model: torch.nn.Module  # prepared by the accelerator
    optimizer: Any  # prepared by the accelerator
    schedule: Schedule
    num_steps: int
    shares: Shares
    objective: Objective
    checkpoints: Checkpoints
    average: MovingAverage | None = None
    step: int = 0  # optimiser steps done
    best: float = -math.inf
    skipped: int = 0  # unreadable images on all processes
    history: list[dict[str, float]] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)  # of the last evaluation
    identity: dict[str, Any] = field(default_factory=dict)  # of "data", and of the "model" that training began from

    @property
    def parameters(self) -> dict[str, torch.Tensor]:
        """The model's parameters by name, as they are without the accelerator's wrappers."""
        return dict(self.accelerator.unwrap_model(self.model).named_parameters())


def train(
    run: Run,
    batches: Iterator[dict[str, torch.Tensor]],
    evaluate: Callable[[], dict[str, float]],
    keep_best: Callable[[], None],
) -> Report:
    """Take the remaining optimiser steps.

    Args:
        batches: one per forward, from the step that `run` stands at.
        evaluate: returns metrics of the model as it is, "accuracy" or "loss" among them; called by every process.
        keep_best: saves the model as it is; called by every process when a better one is found.

    Raises:
        TrainingStopped: when a gradient is not finite.
    """
    settings = run.settings
    report = Report(run.accelerator, settings, run.num_steps, run.step, run.history)
    eval_every = settings.eval_every or max(run.num_steps // 10, 1)
    save_every = settings.save_every or eval_every
    window = _Window(run)
    run.model.train()
    for step in range(run.step, run.num_steps):
        window.add(step, *optimizer_step(run, step, batches))
        run.step = step + 1
        report.bar.update()
        last = run.step == run.num_steps
        evaluates, saves = last or run.step % eval_every == 0, last or run.step % save_every == 0
        if evaluates or saves or run.step % settings.log_every == 0:
            report.log(run.step, {**window.close(), "learning_rate": run.schedule(step)})
        if evaluates:
            _evaluate_and_keep(run, report, evaluate, keep_best)
        if saves:
            _save(run)
    report.bar.close()
    return report


def optimizer_step(run: Run, step: int, batches: Iterator[dict]) -> tuple[torch.Tensor, torch.Tensor]:
    """One update from `accumulation` forwards of this process.

    All forwards are of one size, so the mean over them and over the processes is the mean over the whole batch.

    Returns:
        Sums over this process's samples (3,): loss, correct and skipped; and the norm of the gradient.
    """
    accelerator = run.accelerator
    rng = _seed_step(run.settings.seed, step, accelerator.process_index)
    set_learning_rate(run.optimizer, run.schedule(step))
    sizes = draw_sizes(run.settings, step)
    sums = torch.zeros(3, device=accelerator.device)
    norm = torch.zeros(())
    for _ in range(run.shares.accumulation):
        batch = {name: t.to(accelerator.device, non_blocking=True) for name, t in _next_batch(run, batches).items()}
        with accelerator.accumulate(run.model):
            with accelerator.autocast():
                losses, correct = run.objective(run.model, batch, rng, **sizes)
            accelerator.backward(losses.mean())
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(run.model.parameters(), run.settings.max_grad_norm or math.inf)
            run.optimizer.step()
            run.optimizer.zero_grad()
        sums += torch.stack([losses.detach().sum(), correct.sum(), batch["skipped"].sum()]).float()
    if run.average is not None:
        run.average.update(run.parameters)
    return sums, torch.zeros(()) if norm is None else torch.as_tensor(norm)  # DeepSpeed clips by itself


def _next_batch(run: Run, batches: Iterator[dict]) -> dict[str, torch.Tensor]:
    try:
        return next(batches)
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        newest, _ = run.checkpoints.newest()
        raise TrainingStopped(
            f"a data worker died at step {run.step}, often for lack of memory: {error}; "
            f"the last good checkpoint is {newest or 'none'}; try fewer num_workers, then --resume"
        ) from error


def _seed_step(seed: int, step: int, process: int) -> np.random.Generator:
    """Dropout and the like of this step and process; the generator returned is the same on all processes."""
    words = np.random.SeedSequence((seed, step, process)).generate_state(1)
    set_seed(int(words[0]))
    return np.random.default_rng((seed, step))


class _Window:
    """Means over the steps since the last report; nothing waits for the device before `close`."""

    def __init__(self, run: Run):
        self.run = run
        self.entries: list[tuple[int, torch.Tensor, torch.Tensor]] = []

    def add(self, step: int, sums: torch.Tensor, norm: torch.Tensor) -> None:
        """Note what `optimizer_step` returned for a step."""
        self.entries.append((step, sums, norm))
        if self.run.accelerator.device.type == "cpu":
            self._refuse_infinite(step, norm)

    def close(self) -> dict[str, float]:
        """Return the means over all processes, and begin again; raise TrainingStopped if they are not finite."""
        for step, _, norm in self.entries:
            self._refuse_infinite(step, norm)
        sums = self.run.accelerator.reduce(torch.stack([sums for _, sums, _ in self.entries]).sum(dim=0), "sum")
        loss, correct, skipped = sums.tolist()  # pyright: ignore[reportAttributeAccessIssue]
        samples = len(self.entries) * self.run.shares.batch_size
        norm = float(self.entries[-1][2])
        self.run.skipped += int(skipped)
        self.entries = []
        if not math.isfinite(loss):
            raise self._stopped(self.run.step - 1, f"the loss is {loss}")
        return {"loss": loss / samples, "accuracy": correct / samples, "gradient_norm": norm}

    def _refuse_infinite(self, step: int, norm: torch.Tensor) -> None:
        """The norm is over all processes, so all of them stop. With fp16, infinite ones are skipped by the scaler."""
        if self.run.accelerator.scaler is None and not math.isfinite(float(norm)):
            raise self._stopped(step, f"the gradient's norm is {float(norm)}")

    def _stopped(self, step: int, why: str) -> TrainingStopped:
        newest, _ = self.run.checkpoints.newest()
        return TrainingStopped(
            f"{why} at step {step} with learning rate {self.run.schedule(step):.4g}; the last good checkpoint is "
            f"{newest or 'none'}; try a lower learning rate, a longer warm-up or max_grad_norm"
        )


def _evaluate_and_keep(
    run: Run, report: Report, evaluate: Callable[[], dict[str, float]], keep_best: Callable[[], None]
) -> None:
    """Evaluate, with the averaged weights if there are any, and keep the model if it is the best so far."""
    if run.average is not None:
        run.average.swap(run.parameters)
    metrics = run.metrics = evaluate()
    if metrics:
        report.log(run.step, {f"eval_{name}": value for name, value in metrics.items()})
        quality = metrics.get("accuracy", -metrics["loss"])
        if quality > run.best:
            run.best = quality
            keep_best()
    if run.average is not None:
        run.average.swap(run.parameters)
    run.model.train()


def _save(run: Run) -> None:
    """Write a checkpoint; every process takes part, since weights may be spread over them."""
    model = run.accelerator.unwrap_model(run.model)
    if run.accelerator.distributed_type == DistributedType.DEEPSPEED:  # keeps the optimiser's state to itself
        whole_model: Any = run.accelerator.get_state_dict(run.model)
        groups = {"model": {name: checkpoints.whole(tensor) for name, tensor in whole_model.items()}}
    else:
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
    if run.accelerator.distributed_type == DistributedType.DEEPSPEED:
        raise ValueError("DeepSpeed keeps the optimiser's state to itself; resume needs another launcher template")
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
