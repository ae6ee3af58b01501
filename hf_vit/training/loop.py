"""Training loop; each optimiser step is a function of its number and the state before it."""

import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import numpy as np
import torch
from accelerate.utils import set_seed
from torch.distributed.tensor import DTensor

from ..files.messages import INTERRUPTED
from .devices import mark_step
from .optimization import set_learning_rate
from .patch_sizes import draw_sizes
from .preemption import PREEMPTED, Preempted, Preemption
from .reporting import Report
from .resuming import save
from .run import Run, TrainingStopped


def train(
    run: Run,
    batches: Iterator[dict[str, torch.Tensor]],
    evaluate: Callable[[], dict[str, float]],
    keep_best: Callable[[], None],
) -> Report:
    """Take the remaining optimiser steps.

    Args:
        batches: one per forward, from the current step of `run`.
        evaluate: returns metrics of the current model, among them "accuracy" or "loss"; called by every process.
        keep_best: saves the current model; called by every process when it is the best so far.

    Raises:
        TrainingStopped: a loss or a gradient is not finite, or a data worker died.
        Preempted: SIGTERM, SIGUSR1 or SIGINT came, and a checkpoint of the step has been written.
    """
    settings = run.settings
    report = Report(run)
    eval_every = settings.eval_every or max(run.num_steps // 10, 1)
    save_every = settings.save_every or eval_every
    window = _Window(run)
    run.model.train()
    preemption = Preemption(run.accelerator.num_processes, run.accelerator.is_main_process)
    with closing(report), preemption:
        for step in range(run.step, run.step if run.is_stale else run.num_steps):
            preemption.begin_step()
            window.add(step, optimizer_step(run, step, batches, window.sums))
            run.step = step + 1
            report.advance()
            preempted, last = preemption.end_step(), run.step == run.num_steps
            evaluates = last or run.step % eval_every == 0
            saves = last or run.step % save_every == 0 or preempted
            if evaluates or saves or run.step % settings.log_every == 0:
                report.log({**window.close(), "learning_rate": run.schedule(step)})
            if evaluates:
                run.place.enter("evaluating", run.step)
                _evaluate_and_keep(run, report, evaluate, keep_best)
            stops = evaluates and not last and run.is_stale
            if saves or stops:
                run.place.enter("saving", run.step)
                save(run)
            if evaluates or saves:
                report.speed.begin()
            if preempted and not last:
                _end_early(run, preempted)
            if stops:
                _say_early_end(run)
                break
        run.place.enter("saving", run.step)
        run.checkpoints.wait()
    return report


def _say_early_end(run: Run) -> None:
    patience = f"{run.settings.early_stopping} evaluations in a row were no better than that of step {run.best_step}"
    run.accelerator.print(f"training ends at step {run.step} of {run.num_steps}: {patience}")


def _end_early(run: Run, number: int) -> None:
    run.checkpoints.wait()
    by_user = number == signal.SIGINT
    raise Preempted(
        f"{'Ctrl-C' if by_user else signal.Signals(number).name}: training has saved step {run.step} of "
        f"{run.num_steps} in {run.checkpoints.folder} and ends; run the same command with --resume to continue",
        INTERRUPTED if by_user else PREEMPTED,
    )


def optimizer_step(run: Run, step: int, batches: Iterator[dict], sums: torch.Tensor) -> torch.Tensor:
    """Take one optimiser step, with `accumulation` forwards on this process.

    All forwards have the same number of samples, so that the mean over forwards and processes is that over the batch.

    Args:
        sums: (4,), changed in place: loss, correct and skipped of this process's samples are added, and 1 for an
            infinite norm.

    Returns:
        The norm of the gradient, a scalar.
    """
    accelerator = run.accelerator
    set_learning_rate(run.optimizer, run.schedule(step))
    sizes = draw_sizes(run.settings, step)
    norm = torch.zeros((), device=accelerator.device)
    for forward in range(run.shares.accumulation):
        batch = {name: t.to(accelerator.device, non_blocking=True) for name, t in _next_batch(run, batches).items()}
        rng = _seed_forward(run.settings.seed, step, run.shares.micro_batch(forward))
        with accelerator.accumulate(run.model):
            with accelerator.autocast():
                losses, correct = run.objective(run.model, batch, rng, **sizes)
            accelerator.backward(losses.mean())
            if accelerator.sync_gradients:
                limit = run.settings.max_grad_norm or math.inf
                norm = _whole(accelerator.clip_grad_norm_(run.model.parameters(), limit))
                run.optimizer.step()
                run.optimizer.zero_grad()
                if run.average is not None:
                    run.average.update(run.parameters)
        sums += torch.stack([losses.detach().sum(), correct.sum(), batch["skipped"].sum(), ~norm.isfinite()]).float()
        mark_step(accelerator)
    return norm


def _whole(norm: Any) -> torch.Tensor:
    """Convert a norm to a plain tensor; that of sharded gradients is a DTensor."""
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _next_batch(run: Run, batches: Iterator[dict]) -> dict[str, torch.Tensor]:
    run.place.enter("waiting for data", run.step)
    began = time.perf_counter()
    try:
        return next(batches)
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        newest, _ = run.checkpoints.newest()
        raise TrainingStopped(
            f"a data worker died at step {run.step}, often for lack of memory: {error}; "
            f"the last good checkpoint is {newest or 'none'}; set fewer --num-workers and --resume"
        ) from error
    finally:
        run.waited += time.perf_counter() - began
        run.place.enter("training", run.step)


def _seed_forward(seed: int, step: int, micro_batch: int) -> np.random.Generator:
    """Seed torch for one micro-batch (dropout etc.), and return a generator that is the same for the whole step.

    With it, one mixing weight serves the whole batch, as in the original, on any number of processes.
    """
    words = np.random.SeedSequence((seed, step, micro_batch)).generate_state(1)
    set_seed(int(words[0]))
    return np.random.default_rng((seed, step))


class _Window:
    """Means over the steps since the last report; only `close` waits for the device."""

    def __init__(self, run: Run):
        self.run = run
        self._begin()

    def _begin(self) -> None:
        self.sums = torch.zeros(4).to(self.run.accelerator.device)  # for `optimizer_step`
        self.norms: list[tuple[int, torch.Tensor]] = []

    def add(self, step: int, norm: torch.Tensor) -> None:
        """Record the gradient norm of a step."""
        self.norms.append((step, norm))
        if self.run.accelerator.device.type == "cpu":
            self._refuse_infinite(step, norm)

    def close(self) -> dict[str, float]:
        """Return the means over all processes, and reset them; raise TrainingStopped if they are not finite."""
        sums: Any = self.run.accelerator.reduce(self.sums, "sum")
        loss, correct, skipped, infinite = sums.tolist()
        for step, norm in self.norms if infinite else []:
            self._refuse_infinite(step, norm)
        samples = len(self.norms) * self.run.shares.batch_size
        norm = float(self.norms[-1][1])
        self.run.skipped += int(skipped)
        self._begin()
        if not math.isfinite(loss):
            raise self._stopped(self.run.step - 1, f"the loss is {loss}")
        return {"loss": loss / samples, "accuracy": correct / samples, "gradient_norm": norm}

    def _refuse_infinite(self, step: int, norm: torch.Tensor) -> None:
        """Stop at an infinite norm, on all processes, as the norm is the same. With fp16 the scaler skips the step."""
        if self.run.accelerator.scaler is None and not math.isfinite(float(norm)):
            raise self._stopped(step, f"the gradient's norm is {float(norm)}")

    def _stopped(self, step: int, why: str) -> TrainingStopped:
        newest, _ = self.run.checkpoints.newest()
        return TrainingStopped(
            f"{why} at step {step} with learning rate {self.run.schedule(step):.4g}; the last good checkpoint is "
            f"{newest or 'none'}; try a lower learning rate, a longer warm-up or --max-grad-norm"
        )


def _evaluate_and_keep(
    run: Run, report: Report, evaluate: Callable[[], dict[str, float]], keep_best: Callable[[], None]
) -> None:
    """Evaluate, with the averaged weights if any, and keep the model if it is the best so far."""
    if run.average is not None:
        run.average.swap(run.parameters)
    metrics = run.metrics = evaluate()
    if metrics:
        report.log({f"eval_{name}": value for name, value in report.choose(metrics).items()})
        quality = run.quality_of(metrics)
        if quality > run.best:
            run.best = quality
            keep_best()
    if run.average is not None:
        run.average.swap(run.parameters)
    run.model.train()
