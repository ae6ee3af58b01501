"""A training run. `Trainer.fit` describes it, and the other methods are its parts.

Every optimizer step is a function of its number and of the state before it: the images, the learning rate and the
random numbers of a step depend on nothing else. So a resumed run computes what an uninterrupted one does.
"""

import math
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from accelerate.utils.memory import release_memory, should_reduce_batch_size
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from ..data.labels import distinguish, names_of
from ..data.loaders import EvalDataset
from ..data.samplers import BatchLayout
from ..data.splits import Split
from ..evaluation.predictions import evaluation_batches, predict, score, score_classes
from ..files.messages import INTERRUPTED
from ..files.output import new_model_files, write_json, write_text
from ..models.configuration_hf_vit import as_pair
from . import checkpoint
from .build import (
    build_objective,
    check_evaluation,
    check_native,
    count_steps,
    fingerprint_run,
    prepare,
    training_batches,
)
from .checkpoint import Checkpoints, claimed_output, saved_per_device
from .console import Console
from .figures import describe_target, join_patches, write_batch
from .launch import mark_step, sharded_parameters
from .models import prepare_for_training, save_plain
from .objectives import MaskedPatches
from .optimization import MovingAverage, set_learning_rate
from .patch_sizes import draw_sizes, over_patch_sizes
from .preemption import PREEMPTED, Preempted, Preemption
from .recipes import dump
from .result_page import card_data, write_run_reports
from .schedules import build_schedule
from .settings import TrainingSettings
from .stalls import Progress, WatchedBatches, named_when_missing

_DRAWN = 36  # images of train_batch.png


class TrainingStopped(RuntimeError):
    """Error after which training cannot continue; the last checkpoint is good."""


@dataclass
class TrainState:
    """Progress of a run, which its checkpoints keep beside the tensors."""

    step: int = 0  # optimizer steps done
    best: float = -math.inf  # quality of the best evaluation, see `Trainer.quality_of`
    skipped: int = 0  # unreadable images on all processes
    history: list[dict[str, float]] = field(default_factory=list)  # logged values, each entry with its "step"


class Trainer:
    """A training run: its settings, model, data sets and progress.

    Args:
        model: a model of `hf_vit.training.models`; it is changed.
        processor: the image processor of the evaluation, which is saved with the model.
        split, eval_split: the images to train and to evaluate on.

    Raises:
        ValueError: the settings do not fit model, data or device.
    """

    def __init__(
        self,
        settings: TrainingSettings,
        accelerator: Accelerator,
        model: PreTrainedModel,
        processor: Any,
        split: Split,
        eval_split: Split | None = None,
    ):
        check_native(settings, accelerator, model, processor, split)
        check_evaluation(settings, eval_split, model.config)
        self.settings, self.accelerator, self.processor = settings, accelerator, processor
        self.split, self.eval_split, self.config = split, eval_split, model.config
        self.output = Path(str(settings.output_dir))
        self.checkpoints = Checkpoints(self.output / "checkpoints", settings.keep_checkpoints)
        self.state = TrainState()
        self.num_steps = count_steps(settings, split)
        self.schedule = build_schedule(settings, self.num_steps)
        self.objective = build_objective(settings, processor, model.config, split, accelerator.device)
        prepare_for_training(model, settings)
        self.layout = self._share_batch(model)
        accelerator.gradient_accumulation_steps = self.layout.accumulation
        self.model, self.optimizer = prepare(settings, accelerator, model)
        self.average = None if settings.ema_decay is None else MovingAverage(self.parameters, settings.ema_decay)
        self.preemption = Preemption(accelerator.num_processes, accelerator.is_main_process)
        self.progress = Progress()
        self.metrics: dict[str, float] = {}  # of the last evaluation
        self.predictions: dict[str, Any] = {}  # of the last evaluation, see `evaluate.predict`
        self.identity: dict[str, Any] = {}  # fingerprints of the "data" and of the initial "model"
        self._sums, self._norms = torch.zeros(4, device=accelerator.device), []  # since the last log entry

    def fit(self) -> dict[str, Any]:
        """Train, save the model with its reports, and return its metrics.

        Raises:
            TrainingStopped: a loss or a gradient is not finite, a data worker died, or memory ran out.
            Preempted: SIGTERM, SIGUSR1 or SIGINT came, and a checkpoint of the step was written.
        """
        settings, state = self.settings, self.state
        eval_every = settings.eval_every or max(self.num_steps // 10, 1)
        save_every = settings.save_every or eval_every
        with (
            named_when_missing(self.progress, self.layout, settings.stall_timeout),
            claimed_output(self.output, settings, self.accelerator),
        ):
            self.start()  # continues from a checkpoint with --resume
            with self.console, self.preemption, self.explained_end():
                for step in range(state.step, state.step if self.is_stale else self.num_steps):
                    self.preemption.begin_step()
                    self.train_step(step)  # forward, backward, clipping, optimizer, average
                    received = self.preemption.end_step()
                    evaluates, saves = self.is_due(eval_every), self.is_due(save_every) or received is not None
                    if evaluates or saves or self.is_due(settings.log_every):
                        self.console.log({**self.mean_metrics(), "learning_rate": self.schedule(step)})
                    if evaluates:
                        with self.averaged_weights():
                            self.metrics = self.evaluate()
                            self.keep_best(self.metrics)
                    stops = evaluates and self.is_stale
                    if saves or stops:
                        self.save()
                    if evaluates or saves:
                        self.console.speed.begin()
                    if state.step < self.num_steps and received is not None:
                        self.end_early(received)
                    if state.step < self.num_steps and stops:
                        self.console.print_early_stop()
                        break
                self.phase = "saving"
                self.checkpoints.wait()
            return self.finish()

    def start(self) -> None:
        """Resume if the settings say so, and open the batches from there on."""
        settings = self.settings
        self.phase = "resuming"
        self.identity = fingerprint_run(settings, self.split)
        if settings.resume:
            checkpoint.resume(self)
        self.phase = "starting"
        steps = range(self.state.step, self.num_steps)
        loader = training_batches(settings, self.split, self.processor, self.config, self.layout, steps)
        self.batches = iter(WatchedBatches(loader, self.progress))
        if self.eval_split is not None:
            shape = as_pair(self.config.image_size), self.config.num_channels
            samples = EvalDataset(self.eval_split, self.processor, *shape)
            batches = settings.eval_batch_size, settings.num_workers
            loader, self.padding = evaluation_batches(samples, self.accelerator, *batches)
            self.eval_loader = WatchedBatches(loader, self.progress)
        if self.accelerator.is_main_process:
            write_text(self.output / "recipe.yaml", dump(settings))
        self.console = Console(self)
        self.model.train()

    def train_step(self, step: int) -> None:
        """Take one optimizer step, with `layout.accumulation` forwards on this process.

        All forwards have the same number of samples, so that the mean over forwards and processes is that of the batch.
        """
        accelerator, settings = self.accelerator, self.settings
        set_learning_rate(self.optimizer, self.schedule(step))
        sizes = draw_sizes(settings, step)
        norm: Any = torch.zeros((), device=accelerator.device)
        for forward in range(self.layout.accumulation):
            batch = self.next_batch()
            if step == forward == 0 and accelerator.is_main_process:
                self.draw_batch(batch)
            # Torch is seeded for each micro-batch; the generator, for mixing, is the same for the whole batch
            words = np.random.SeedSequence((settings.seed, step, self.layout.micro_batch(forward))).generate_state(1)
            set_seed(int(words[0]))
            rng = np.random.default_rng((settings.seed, step))
            with accelerator.accumulate(self.model):
                with accelerator.autocast():
                    losses, correct = self.objective(self.model, batch, rng, **sizes)
                accelerator.backward(losses.mean())
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(self.model.parameters(), settings.max_grad_norm or math.inf)
                    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                    if self.average is not None:
                        self.average.update(self.parameters)
            figures = [losses.detach().sum(), correct.sum(), batch["skipped"].sum(), ~norm.isfinite()]
            self._sums += torch.stack(figures).float()
            mark_step(accelerator)
        self._norms.append((step, norm))
        if accelerator.device.type == "cpu":  # reading it elsewhere would wait for the device
            self._refuse_infinite(step, norm)
        self.state.step = step + 1
        self.console.advance()

    def next_batch(self) -> dict[str, torch.Tensor]:
        """The batch of the next forward, on the device."""
        self.phase = "waiting for data"
        try:
            batch = next(self.batches)
        except RuntimeError as error:
            if "DataLoader worker" not in str(error):
                raise
            raise TrainingStopped(
                f"a data worker died at step {self.state.step}, often for lack of memory: {error}; "
                f"the last good checkpoint is {self.checkpoints.newest()[0] or 'none'}; set fewer --num-workers and "
                "--resume"
            ) from error
        self.phase = "training"
        return {name: tensor.to(self.accelerator.device, non_blocking=True) for name, tensor in batch.items()}

    def draw_batch(self, batch: dict[str, torch.Tensor]) -> None:
        """Draw the first images of a batch, as the model sees them, with their labels: train_batch.png."""
        rng = np.random.default_rng((self.settings.seed, self.state.step))  # as for its step
        pixels, targets = self.objective.prepare(batch, rng)
        pixels, captions = self.objective.normalizer.inverse(pixels[:_DRAWN]).cpu(), [""] * _DRAWN
        if targets is not None:
            names = distinguish(names_of(self.config))
            captions = [describe_target(target, names) for target in targets[:_DRAWN].cpu().numpy()]
        if "spatial_shapes" in batch:
            kept, size = batch.get("kept_patches", [None] * _DRAWN), as_pair(self.processor.patch_size)
            rows = zip(pixels.numpy(), batch["spatial_shapes"].tolist(), kept, strict=False)
            images = [join_patches(patches, grid, size, chosen) for patches, grid, chosen in rows]
        else:
            images = list(pixels.permute(0, 2, 3, 1).numpy())
        write_batch(images, captions[: len(images)], self.output / "train_batch.png")

    def mean_metrics(self) -> dict[str, float]:
        """Means over the steps since the last call, on all processes.

        Raises:
            TrainingStopped: they are not finite.
        """
        sums: Any = self.accelerator.reduce(self._sums, "sum")
        loss, correct, skipped, infinite = sums.tolist()
        for step, norm in self._norms if infinite else []:
            self._refuse_infinite(step, norm)
        if not math.isfinite(loss):
            raise self._diverged(self.state.step - 1, f"the loss is {loss}")
        samples, norm = len(self._norms) * self.layout.batch_size, float(self._norms[-1][1])
        self.state.skipped += int(skipped)
        self._sums, self._norms = torch.zeros_like(self._sums), []
        return {"loss": loss / samples, "accuracy": correct / samples, "gradient_norm": norm}

    def evaluate(self) -> dict[str, float]:
        """Metrics of the current model on the evaluation split; none without one."""
        self.phase = "evaluating"
        if self.eval_split is None:
            return {}
        if isinstance(self.objective, MaskedPatches):
            return self.objective.evaluate(self.accelerator, self.model, self.eval_loader, self.padding)
        names = distinguish(names_of(self.config))

        def measure(**sizes: int) -> dict[str, float]:
            batches = self.eval_loader, self.padding
            self.predictions = predict(self.accelerator, self.model, *batches, self.settings.loss, **sizes)
            return score(self.predictions) | score_classes(self.predictions, names)

        return over_patch_sizes(self.settings.eval_patch_sizes or self.settings.patch_sizes, measure)

    def keep_best(self, metrics: dict[str, float]) -> None:
        """Log an evaluation, and save the model to best/ if it is better than all before."""
        if metrics:
            self.console.log_evaluation(metrics)
            quality = self.quality_of(metrics)
            if quality > self.state.best:
                self.state.best = quality
                self.save_model(self.output / "best", with_facts=True)
        self.model.train()

    def save(self) -> None:
        """Start writing a checkpoint in the background; every process must call it."""
        self.phase = "saving"
        checkpoint.save(self)

    def finish(self) -> dict[str, Any]:
        """Save the model, its metrics and its reports; return the metrics."""
        if self.average is not None:
            self.average.swap(self.parameters)
        metrics = {**(self.metrics or self.evaluate()), **self.console.totals(), **self.best_evaluation()}
        self.phase = "saving"
        self.save_model(self.output)
        if self.accelerator.is_main_process:
            write_json(self.output / "metrics.json", metrics)
            write_run_reports(self, metrics)
        self.accelerator.wait_for_everyone()
        return metrics

    def save_model(self, folder: Path, with_facts: bool = False) -> None:
        """Save the current model and its processor; every process must call it.

        Raises:
            OSError: it cannot be written; an older model in the folder is unchanged.
        """
        model: Any = self.accelerator.unwrap_model(self.model)
        tensors = checkpoint.whole_model(model, keep=self.accelerator.is_main_process)
        if self.accelerator.is_main_process:
            with new_model_files(folder) as draft:
                save_plain(model, tensors, draft)
                self.processor.save_pretrained(draft)
                if with_facts:
                    write_json(draft / "card_data.json", card_data(self, {**self.metrics, **self.best_evaluation()}))
        self.accelerator.wait_for_everyone()

    @property
    def phase(self) -> str:
        """What this process does; every process enters the same phases in the same order."""
        return self.progress.phase

    @phase.setter
    def phase(self, phase: str) -> None:
        self.progress.enter(phase, self.state.step)

    @property
    def parameters(self) -> dict[str, torch.Tensor]:
        """The model's parameters by name, without the accelerator's wrappers; DTensors if they are sharded."""
        return sharded_parameters(self.accelerator.unwrap_model(self.model))

    def is_due(self, every: int) -> bool:
        """Tell whether something that comes every so many steps is due now; after the last step all is."""
        return self.state.step == self.num_steps or self.state.step % every == 0

    @property
    def best_metric(self) -> str:
        """Name of the metric that chooses the best model."""
        name = self.settings.best_metric
        return name if name != "auto" else "loss" if isinstance(self.objective, MaskedPatches) else "accuracy"

    def quality_of(self, metrics: dict[str, float]) -> float:
        """Return the quality of an evaluation by `best_metric`; higher is better.

        Raises:
            TrainingStopped: the evaluation has no such metric.
        """
        name = self.best_metric
        if name not in metrics:
            raise TrainingStopped(f"--best-metric is {name}, but an evaluation has {', '.join(metrics)}")
        return -metrics[name] if name == "loss" else metrics[name]

    def evaluations(self) -> dict[int, float]:
        """Step -> quality of the evaluations so far."""
        return {
            int(entry["step"]): self.quality_of({name.removeprefix("eval_"): value for name, value in entry.items()})
            for entry in self.state.history
            if "eval_loss" in entry
        }

    @property
    def is_stale(self) -> bool:
        """Tell whether the last `early_stopping` evaluations were no better than an earlier one."""
        patience, qualities = self.settings.early_stopping, list(self.evaluations().values())
        if patience is None or not qualities:
            return False
        return len(qualities) > qualities.index(max(qualities)) + patience

    def best_evaluation(self) -> dict[str, Any]:
        """Return "best", the value of the "best_metric", and the "best_step"; None without an evaluation."""
        evaluations, best = self.evaluations(), self.state.best
        if not evaluations or not math.isfinite(best):
            return {"best": None, "best_metric": None, "best_step": None}
        value, step = -best if self.best_metric == "loss" else best, max(evaluations, key=evaluations.__getitem__)
        return {"best": value, "best_metric": self.best_metric, "best_step": step}

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Give the model the averaged weights, if there are any."""
        if self.average is not None:
            self.average.swap(self.parameters)
        yield
        if self.average is not None:
            self.average.swap(self.parameters)

    @contextmanager
    def explained_end(self) -> Iterator[None]:
        """Tell after a lack of memory or Ctrl-C where the run is and how to go on; the first step may lack memory."""
        first = self.state.step
        try:
            yield
        except RuntimeError as error:
            if self.state.step == first or isinstance(error, TrainingStopped) or not should_reduce_batch_size(error):
                raise
            raise TrainingStopped(
                f"memory ran out at step {self.state.step}: {error}; set a smaller --per-device-batch-size or "
                "--eval-batch-size"
            ) from error
        except KeyboardInterrupt:
            with suppress(Exception):  # the checkpoint that is being written; the program would wait for it at its end
                self.checkpoints.wait()
            kept = self.checkpoints.paths()
            remedy = (
                f"{kept[-1]} is kept; run the same command with --resume to continue" if kept else "nothing was saved"
            )
            raise KeyboardInterrupt(f"interrupted at step {self.state.step} of {self.num_steps}; {remedy}") from None

    def end_early(self, received: int) -> None:
        """End after a signal; the step is saved."""
        self.checkpoints.wait()
        by_user = received == signal.SIGINT
        raise Preempted(
            f"{'Ctrl-C' if by_user else signal.Signals(received).name}: training has saved step {self.state.step} of "
            f"{self.num_steps} in {self.checkpoints.folder} and ends; run the same command with --resume to continue",
            INTERRUPTED if by_user else PREEMPTED,
        )

    def _refuse_infinite(self, step: int, norm: torch.Tensor) -> None:
        """Stop at an infinite norm, on all processes, as the norm is the same. With fp16 the scaler skips the step."""
        if self.accelerator.scaler is None and not math.isfinite(float(norm)):
            raise self._diverged(step, f"the gradient's norm is {float(norm)}")

    def _diverged(self, step: int, reason: str) -> TrainingStopped:
        return TrainingStopped(
            f"{reason} at step {step} with learning rate {self.schedule(step):.4g}; the last good checkpoint is "
            f"{self.checkpoints.newest()[0] or 'none'}; try a lower learning rate, a longer warm-up or --max-grad-norm"
        )

    def _share_batch(self, model: Any) -> BatchLayout:
        """Divide the batch among processes and forwards, with as many images per forward as fit into memory."""
        settings, accelerator = self.settings, self.accelerator
        per_device = settings.per_device_batch_size or max(settings.batch_size // accelerator.num_processes, 1)
        if settings.resume and (settings.find_batch_size or settings.per_device_batch_size is None):
            per_device = saved_per_device(self.checkpoints) or per_device
        while True:
            layout = BatchLayout(settings.batch_size, per_device, accelerator.num_processes, accelerator.process_index)
            if not settings.find_batch_size:
                return layout
            lacking = torch.tensor(float(not self._fits(model, layout)), device=accelerator.device)
            if not torch.as_tensor(accelerator.reduce(lacking, "sum")):
                return layout
            if per_device == 1:
                raise TrainingStopped("one image per forward does not fit into memory")
            accelerator.print(f"{per_device} images per forward do not fit into memory; trying {per_device // 2}.")
            per_device //= 2

    def _fits(self, model: Any, layout: BatchLayout) -> bool:
        """Tell whether a forward and a backward fit into this process's memory, beside the optimizer's state.

        Nothing is exchanged with other processes, which would wait for one that lacks memory.
        """
        settings, device = self.settings, self.accelerator.device
        alone = replace(settings, num_workers=0)
        loader = training_batches(alone, self.split, self.processor, self.config, layout, range(1))
        batch = {name: tensor.to(device) for name, tensor in next(iter(loader)).items()}
        sizes = {"patch_size": min(settings.patch_sizes)} if settings.patch_sizes else {}
        model.to(device).train()
        try:
            trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
            reserved = [torch.empty_like(parameter) for parameter in trained * 3]  # two moments and the average
            with self.accelerator.autocast():
                losses, _ = self.objective(model, batch, np.random.default_rng(0), **sizes)
            losses.mean().backward()
            del reserved
        except RuntimeError as error:
            if not should_reduce_batch_size(error):
                raise
            return False
        finally:
            model.zero_grad()
            release_memory()
        return True
