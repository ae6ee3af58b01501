"""A training run: read `Trainer.fit` first; the other methods are its steps.

Every optimizer step is a function of its number and of the state before it: the images, the learning rate and the
random numbers of a step depend on nothing else. So a resumed run computes what an uninterrupted one does.
"""

import math
import signal
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from accelerate.utils.memory import release_memory, should_reduce_batch_size
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from ..data.device_augmentation import CropTransform, DeviceAugmentation
from ..data.labels import names_of
from ..data.loaders import TimedBatches
from ..data.samplers import BatchLayout
from ..data.splits import Split
from ..data.summary import write_unused
from ..files.messages import INTERRUPTED
from ..files.output import new_model_files, write_json, write_text
from ..files.readme import write_readme
from ..files.runs import is_error
from ..inference.predictions import EvaluationBatches, evaluate_classifier, to_device
from ..inference.regression import evaluate_regression
from ..settings.fields import TrainingSettings
from ..settings.recipes import dump
from .build import (
    augments_on_device,
    build_objective,
    check_support,
    choose_best_metric,
    count_steps,
    fingerprint_run,
    prepare,
    prepare_for_training,
    save_merged,
    train_transform,
    training_batches,
)
from .checkpoint import (
    Checkpoints,
    check_same_run,
    choose_checkpoint,
    full_state_dict,
    locked_output,
    read_state,
    restore,
    run_tensors,
    saved_jpeg_dct,
    saved_per_device,
)
from .console import Console
from .launch import sharded_parameters
from .objectives import MaskedPatches, Regression, draw_patch_size
from .optimization import MovingAverage, build_schedule, set_learning_rate
from .preemption import PREEMPTED, Preempted, Preemption
from .reports import card_data, draw_batch, explanation_of, write_run_reports
from .run import Run, TrainState
from .timeouts import CollectiveTimeout


class TrainingStopped(RuntimeError):
    """Error after which training cannot continue; the last checkpoint is intact."""


class ProcessStalled(TrainingStopped):
    """Another process does not take part in an operation any more; threads of this one may still wait for it."""


class Trainer:
    """A training run: its settings, model, datasets and progress.

    Args:
        model: a model built by `hf_vit.training.build`; it is modified in place.
        processor: the image processor for evaluation, which is saved with the model.
        split, eval_split: the images for training and for evaluation.
        command: the command line or the Python call, for the model card.

    Raises:
        ValueError: the settings do not fit the model, the data or the device.
    """

    def __init__(
        self,
        settings: TrainingSettings,
        accelerator: Accelerator,
        model: PreTrainedModel,
        processor: Any,
        split: Split,
        eval_split: Split | None = None,
        command: str | None = None,
    ):
        check_support(settings, accelerator, model, processor, split)
        self.best_metric = choose_best_metric(settings, eval_split, model.config)
        self.settings, self.accelerator, self.processor = settings, accelerator, processor
        self.split, self.eval_split, self.config = split, eval_split, model.config
        self.num_steps = count_steps(settings, split)
        self.run = Run(settings, accelerator, model.config, split, eval_split, self.num_steps, command)
        self.output = self.run.output
        self.checkpoints = Checkpoints(self.output / "checkpoints", settings.keep_checkpoints)
        jpeg_dct = saved_jpeg_dct(self.checkpoints) if settings.resume else None
        if jpeg_dct is not None:
            processor.update(jpeg_dct=jpeg_dct)
        self.state = TrainState()
        self.schedule = build_schedule(settings, self.num_steps)
        device = accelerator.device
        self.objective = build_objective(settings, processor, model.config, split, device)
        self.transform = train_transform(settings, processor, model.config, augments_on_device(settings, device))
        self.augmentation = None
        if isinstance(self.transform, CropTransform):
            self.augmentation = DeviceAugmentation(self.transform, device)
        prepare_for_training(model, settings)
        if isinstance(self.objective, Regression):
            self.objective.scale.set_heads(model, self.objective.scale.unfold)
        self.layout = self._choose_layout(model)
        accelerator.gradient_accumulation_steps = self.layout.accumulation
        self.model, self.optimizer = prepare(settings, accelerator, model, self.num_steps)
        self.ema = None if settings.ema_decay is None else MovingAverage(self.parameters, settings.ema_decay)
        self.preemption = Preemption(accelerator.num_processes, accelerator.is_main_process)
        self.timeout = CollectiveTimeout(accelerator, settings.stall_timeout)
        self.metrics: dict[str, float] = {}  # results of the last evaluation
        self.predictions: dict[str, Any] = {}  # result of `evaluation.predictions.predict` in the last evaluation
        # Since the last log entry: sums of loss, correct images and skipped images, and the gradient norm of each step
        self._sums, self._norms = torch.zeros(3, device=device), []

    def fit(self) -> dict[str, Any]:
        """Train, save the model with its reports, and return its metrics.

        Raises:
            TrainingStopped: a loss or a gradient is not finite, a data worker died or stalled, or memory ran out.
            ProcessStalled: another process died, or took no part in a step for `stall_timeout` seconds.
            Preempted: SIGTERM, SIGUSR1 or SIGINT was received, and a checkpoint of the step was written.
        """
        settings, state = self.settings, self.state
        eval_every = settings.eval_every or max(self.num_steps // 10, 1)
        save_every = settings.save_every or eval_every
        with locked_output(self.output, settings, self.accelerator):
            self.start()  # with --resume, from the newest checkpoint
            with closing(self.console), self.preemption, self.report_interruption(), closing(self.batches):
                while state.step < self.num_steps and not self.has_plateaued:
                    self.preemption.begin_step()
                    self.train_step(state.step)  # forward, backward, clipping, optimizer, EMA
                    received = self.preemption.end_step()
                    evaluates = self.is_due(eval_every)
                    saves = self.is_due(save_every) or received is not None
                    if evaluates or saves or self.is_due(settings.log_every):
                        self.console.log(self.mean_metrics())
                    if evaluates:
                        self.swap_ema()
                        self.keep_best(self.evaluate())
                        self.swap_ema()
                    if saves or self.has_plateaued:
                        self.save()
                    if received is not None and state.step < self.num_steps:
                        self.end_early(received)
                    self.timeout.shorten()
                self.timeout.suspend()
                if state.step < self.num_steps:
                    self.console.print_early_stop()
                self.checkpoints.wait()
            return self.finish()

    def start(self) -> None:
        """With `resume`, restore the newest checkpoint; then start loading the batches of the next step."""
        settings = self.settings
        self.run.fingerprint = fingerprint_run(settings, self.split)
        if self.accelerator.is_main_process:
            write_unused(self.output, self.split.unused)
        if settings.resume:
            self.resume()
        steps = range(self.state.step, self.num_steps)
        loader = training_batches(settings, self.split, self.transform, self.layout, steps)
        self.batches = TimedBatches(loader)
        if self.eval_split is not None:
            self.eval_batches = EvaluationBatches(
                settings, self.eval_split, self.processor, self.config, self.accelerator
            )
        if self.accelerator.is_main_process:
            write_text(self.output / "recipe.yaml", dump(settings))
        trains_all = all(parameter.requires_grad for parameter in self.parameters.values())
        self.console = Console(self.run, self.state, self.batches, trains_all)
        self.model.train()

    def train_step(self, step: int) -> None:
        """Take one optimizer step, with `layout.accumulation` forwards on this process.

        All forwards have the same number of samples, so the mean over forwards and processes is that of the batch.
        """
        accelerator, settings = self.accelerator, self.settings
        set_learning_rate(self.optimizer, self.schedule(step))
        sizes = draw_patch_size(settings, step)
        self.timeout.begin_step(sizes.get("patch_size"))
        norm: Any = torch.zeros((), device=accelerator.device)
        for forward in range(self.layout.accumulation):
            batch = self.next_batch()
            if step == forward == 0 and accelerator.is_main_process:
                draw_batch(self.run, self.objective, batch, getattr(self.processor, "patch_size", None))
            # torch is seeded for each micro-batch; the NumPy generator, for mixing, is the same for the whole batch
            seeds = np.random.SeedSequence((settings.seed, step, self.layout.micro_batch(forward)))
            set_seed(int(seeds.generate_state(1)[0]))
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
                    if self.ema is not None:
                        self.ema.update(self.parameters)
            self._sums += torch.stack([losses.detach().sum(), correct.sum(), batch["skipped"].sum()]).float()
        self._norms.append(norm)  # which is read later, because reading waits for the device
        self.state.step = step + 1
        self.console.advance()

    def next_batch(self) -> dict[str, torch.Tensor]:
        """Return the batch of the next forward, on the device."""
        return self._to_device(next(self.batches))

    def _to_device(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        batch = batch if self.augmentation is None else self.augmentation(batch)
        return to_device(batch, self.accelerator.device)

    def mean_metrics(self) -> dict[str, float]:
        """Return the means over the steps since the last call and over all processes, and the last learning rate.

        Raises:
            TrainingStopped: the loss or a gradient norm is not finite.
        """
        sums: Any = self.accelerator.reduce(self._sums, "sum")
        loss, correct, skipped = sums.tolist()
        norms = torch.stack(self._norms).tolist()  # each the same on all processes
        last = self.state.step - 1
        if self.accelerator.scaler is None:  # with fp16, the scaler skips a step with an infinite gradient
            for step, norm in enumerate(norms, start=self.state.step - len(norms)):
                self._check_finite(step, "the gradient norm", norm)
        self._check_finite(last, "the loss", loss)
        samples = len(norms) * self.layout.batch_size
        self.state.skipped += int(skipped)
        self._sums, self._norms = torch.zeros_like(self._sums), []
        means = {"loss": loss / samples, self.objective.measure: correct / samples}
        return {**means, "gradient_norm": norms[-1], "learning_rate": self.schedule(last)}

    def evaluate(self) -> dict[str, float]:
        """Return the metrics of the current model on the evaluation split; {} without a split.

        With several patch sizes, they are the means over the sizes, with "accuracy_at_patch_8" etc. for each size.
        """
        if self.eval_split is None:
            return {}
        self.timeout.suspend()
        if isinstance(self.objective, MaskedPatches):
            return self.objective.evaluate(self.accelerator, self.model, self.eval_batches)
        sizes = self.settings.eval_patch_sizes or self.settings.patch_sizes
        if not sizes:
            return self._evaluate_classifier()
        by_size = {size: self._evaluate_classifier(patch_size=size) for size in sizes}
        first = by_size[sizes[0]]
        means = {name: float(np.mean([metrics[name] for metrics in by_size.values()])) for name in first}
        means |= {"samples": first["samples"], "skipped": first["skipped"]}
        return means | {f"accuracy_at_patch_{size}": metrics["accuracy"] for size, metrics in by_size.items()}

    def _evaluate_classifier(self, **sizes: int) -> dict[str, float]:
        """Return the metrics at one patch size; `predictions` keeps the scores, for the reports."""
        loss = self.settings.loss
        place = self.accelerator, self.model, self.eval_batches
        if isinstance(self.objective, Regression):
            regression = names_of(self.config), self.objective.scale, loss, self.objective.delta
            self.predictions, metrics = evaluate_regression(*place, *regression, **sizes)
        else:
            self.predictions, metrics = evaluate_classifier(*place, loss, self.config, **sizes)
        return metrics

    def keep_best(self, metrics: dict[str, float]) -> None:
        """Log the metrics of an evaluation, and save the model to best/ if they are the best so far.

        Of equal qualities, that with the lower loss is better; early stopping counts only the quality.
        """
        self.metrics = metrics
        if metrics:
            self.console.log_evaluation(metrics)
            quality, state = self.quality_of(metrics), self.state
            loss = metrics.get("loss", math.inf)
            state.no_better = 0 if quality > state.best else state.no_better + 1
            if (quality, -loss) > (state.best, -state.best_loss):
                state.best, state.best_loss, state.best_step = quality, loss, state.step
                self.save_model(self.output / "best", with_card_data=True)
        self.model.train()
        self.console.restart()

    def save(self) -> None:
        """Start writing a checkpoint in the background; every process must call it."""
        self.timeout.suspend()
        tensors = run_tensors(*self._stateful_objects())
        self.checkpoints.save(self.state.step, tensors, self.record())
        self.console.restart()

    def resume(self) -> None:
        """Restore the run from its newest intact checkpoint; without a checkpoint, leave it at step 0.

        Raises:
            ValueError: all checkpoints are damaged; or the settings, the data or the initial model differ from those of
                the checkpoint. The message lists the differences.
        """
        path = choose_checkpoint(self.checkpoints, self.accelerator)
        if path is None:
            folder = self.checkpoints.folder
            self.accelerator.print(f"There is no checkpoint in {folder}: training starts from the beginning.")
            return
        saved, scaler = read_state(path), self.accelerator.scaler
        check_same_run(saved, self.record(), self.settings, self._draws_random_numbers())
        restore(path, *self._stateful_objects())
        if scaler is not None and saved["scaler"]:
            scaler.load_state_dict(saved["scaler"])
        for name in vars(self.state):
            setattr(self.state, name, saved.get(name, getattr(self.state, name)))
        self.accelerator.print(f"Resuming from {path} at step {self.state.step} of {self.num_steps}.")

    def record(self) -> dict[str, Any]:
        """Return the content of state.json for the current step."""
        scaler, layout = self.accelerator.scaler, self.layout
        return {
            **vars(self.state),
            "num_steps": self.num_steps,
            "precision": self.accelerator.mixed_precision,
            "shards": {"processes": layout.processes, "per_device_batch_size": layout.per_device},
            "settings": asdict(self.settings),
            "fingerprint": self.run.fingerprint,
            "jpeg_dct": self.transform.jpeg_dct,
            "scaler": scaler.state_dict() if scaler is not None else None,
        }

    def _stateful_objects(self) -> tuple[torch.nn.Module, torch.optim.Optimizer, dict[str, torch.Tensor] | None]:
        """Return the model, the optimizer, and the EMA's parameters if there is one."""
        ema = self.ema.parameters if self.ema is not None else None
        return self.accelerator.unwrap_model(self.model), self.optimizer.optimizer, ema

    def _draws_random_numbers(self) -> bool:
        """Return whether a micro-batch draws random numbers: for dropout, mixing or random masks."""
        rates = ("hidden_dropout_prob", "attention_probs_dropout_prob", "drop_path_rate")
        mixes = self.settings.mixup_alpha or self.settings.cutmix_alpha
        return bool(
            mixes or isinstance(self.objective, MaskedPatches) or any(getattr(self.config, x, 0) for x in rates)
        )

    def finish(self) -> dict[str, Any]:
        """Save the final model, the metrics and the reports; return the metrics."""
        self.swap_ema()
        metrics = {**(self.metrics or self.evaluate()), **self.console.totals(), **self.best_evaluation()}
        self.save_model(self.output)
        if self.accelerator.is_main_process:
            write_json(self.output / "metrics.json", metrics)
            explain = explanation_of(self.run, self.model, self.processor)
            write_run_reports(self.run, self.state, self.predictions, metrics, explain)
        self.accelerator.wait_for_everyone()
        return metrics

    def save_model(self, folder: Path, with_card_data: bool = False) -> None:
        """Save the current model and its processor; every process must call it.

        Raises:
            OSError: the files cannot be written; an older model in the folder is unchanged.
        """
        model: Any = self.accelerator.unwrap_model(self.model)
        tensors = full_state_dict(model, keep=self.accelerator.is_main_process)
        if self.accelerator.is_main_process:
            if isinstance(self.objective, Regression):
                tensors = self.objective.scale.fold_state(model, tensors)
            with new_model_files(folder) as draft:
                saved = save_merged(model, tensors, draft)
                self.processor.save_pretrained(draft)
                write_readme(draft, saved.config.model_type, type(saved).__name__)
                if with_card_data:
                    write_json(
                        draft / "card_data.json", card_data(self.run, {**self.metrics, **self.best_evaluation()})
                    )
        self.accelerator.wait_for_everyone()

    @property
    def parameters(self) -> dict[str, torch.Tensor]:
        """The model's parameters by name, without accelerate's prefixes; DTensors if they are sharded."""
        return sharded_parameters(self.accelerator.unwrap_model(self.model))

    def is_due(self, every: int) -> bool:
        """Return whether something done every `every` steps is due now; true after the last step."""
        return self.state.step == self.num_steps or self.state.step % every == 0

    def quality_of(self, metrics: dict[str, float]) -> float:
        """Return the quality of an evaluation by `best_metric`; higher is better.

        Raises:
            TrainingStopped: the evaluation has no such metric.
        """
        name = self.best_metric
        if name not in metrics:
            raise TrainingStopped(f"--best-metric is {name}, but the evaluation computes {', '.join(metrics)}")
        return -metrics[name] if is_error(name) else metrics[name]

    @property
    def has_plateaued(self) -> bool:
        """True if the last `early_stopping` evaluations were no better than an earlier one."""
        patience = self.settings.early_stopping
        return patience is not None and self.state.no_better >= patience

    def best_evaluation(self) -> dict[str, Any]:
        """Return the "best" value of the "best_metric" and its "best_step"; each is None without an evaluation."""
        if self.state.best_step is None:
            return {"best": None, "best_metric": None, "best_step": None}
        best = -self.state.best if is_error(self.best_metric) else self.state.best
        return {"best": best, "best_metric": self.best_metric, "best_step": self.state.best_step}

    def swap_ema(self) -> None:
        """Exchange the model's weights with those of the EMA, if there is one."""
        if self.ema is not None:
            self.ema.swap(self.parameters)

    @contextmanager
    def report_interruption(self) -> Iterator[None]:
        """After a failure that is not a bug, or a second Ctrl-C, raise an error that says how to continue."""
        try:
            yield
        except RuntimeError as error:
            if missing := self.timeout.describe(error):
                raise ProcessStalled(
                    f"{missing}, at step {self.state.step}, with --stall-timeout {self.settings.stall_timeout:g}; run "
                    "the same command with --resume to continue"
                ) from error
            if "DataLoader timed out" in str(error):
                reason, remedy = "no batch arrived from the data workers", "a longer --stall-timeout"
            elif "DataLoader worker" in str(error):
                reason, remedy = "a data worker died, often because memory ran out", "fewer --num-workers"
            elif should_reduce_batch_size(error):
                reason, remedy = "memory ran out", "a smaller --per-device-batch-size or --eval-batch-size"
            else:
                raise
            raise TrainingStopped(
                f"{reason}, at step {self.state.step}: {error}; {self._last_checkpoint()}; retry with --resume and "
                f"{remedy}"
            ) from error
        except KeyboardInterrupt:
            raise KeyboardInterrupt(
                f"interrupted at step {self.state.step} of {self.num_steps}; {self._last_checkpoint()}; run the same "
                "command with --resume to continue"
            ) from None

    def _last_checkpoint(self) -> str:
        path, _ = self.checkpoints.newest()  # waits until a checkpoint in progress is complete
        return f"the last intact checkpoint is {path}" if path else "there is no checkpoint yet"

    def end_early(self, received: int) -> None:
        """Raise Preempted after a signal, when the checkpoint is complete."""
        self.checkpoints.wait()
        by_user = received == signal.SIGINT
        raise Preempted(
            f"{'Ctrl-C' if by_user else signal.Signals(received).name}: training stopped after step {self.state.step} "
            f"of {self.num_steps}, which is saved in {self.checkpoints.folder}; run the same command with --resume to "
            "continue",
            INTERRUPTED if by_user else PREEMPTED,
        )

    def _check_finite(self, step: int, what: str, value: float) -> None:
        """Raise TrainingStopped if a value is not finite."""
        if not math.isfinite(value):
            raise TrainingStopped(
                f"{what} is {value} at step {step} with learning rate {self.schedule(step):.4g}; "
                f"{self._last_checkpoint()}; try a lower learning rate, a longer warm-up or --max-grad-norm"
            )

    def _choose_layout(self, model: Any) -> BatchLayout:
        """Divide the batch among processes and forwards; with `find_batch_size`, into parts that fit into memory."""
        settings, accelerator = self.settings, self.accelerator
        processes = accelerator.num_processes
        per_device = settings.per_device_batch_size or max(settings.batch_size // processes, 1)
        if settings.resume and (settings.find_batch_size or settings.per_device_batch_size is None):
            per_device = saved_per_device(self.checkpoints) or per_device
        layout = BatchLayout(settings.batch_size, per_device, processes, accelerator.process_index)
        while settings.find_batch_size and not self._fits(model, layout):
            smaller = [size for size in range(1, per_device // 2 + 1) if per_device % size == 0]
            if not smaller:
                raise TrainingStopped(
                    "not even one image per forward fits into memory; use a smaller model or image size, or set "
                    "--gradient-checkpointing"
                )
            accelerator.print(f"{per_device} images per forward do not fit into memory; trying {smaller[-1]}.")
            per_device = smaller[-1]
            layout = replace(layout, per_device=per_device)
        return layout

    def _fits(self, model: Any, layout: BatchLayout) -> bool:
        """Return whether a forward and a backward, next to the optimizer state, fit into memory on all processes.

        During both, the processes do not communicate: the others would wait forever for one that ran out of memory.
        """
        settings, device = self.settings, self.accelerator.device
        no_workers = replace(settings, num_workers=0)
        loader = training_batches(no_workers, self.split, self.transform, layout, range(1))
        batch = self._to_device(next(iter(loader)))
        sizes = {"patch_size": min(settings.patch_sizes)} if settings.patch_sizes else {}
        model.to(device).train()
        failed = torch.zeros((), device=device)
        try:
            trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
            reserved = [torch.empty_like(parameter) for parameter in trained * 3]  # two moments and the moving average
            with self.accelerator.autocast():
                losses, _ = self.objective(model, batch, np.random.default_rng(0), **sizes)
            losses.mean().backward()
            del reserved
        except RuntimeError as error:
            if not should_reduce_batch_size(error):
                raise
            failed += 1
        model.zero_grad()
        release_memory()
        return not torch.as_tensor(self.accelerator.reduce(failed, "sum"))
