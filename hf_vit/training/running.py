"""Train a model on opened splits and save it; error handling of the scripts."""

import io
import logging
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from accelerate import Accelerator, PartialState
from accelerate.utils.memory import should_reduce_batch_size
from transformers import PreTrainedModel

from ..data.samplers import BatchLayout
from ..data.splits import Split
from ..files.messages import ends_in_one_sentence
from ..files.output import write_json
from ..files.progress import silence_progress_bars
from .assembly import check_native, evaluator, fingerprint_run, prepare_run, saver, training_batches
from .loop import train
from .models import set_head_bias
from .objectives import Classification
from .output_folder import checkpoints_of, claimed_output, output_of, write_recipe
from .patch_sizes import prepare_patch_sizes
from .preemption import Preempted
from .reporting import Report, card_data, write_curve
from .result_page import held_out_of, write_card_results, write_run_results
from .resuming import resume, saved_per_device
from .run import Run, TrainingStopped
from .settings import TrainingSettings
from .stalls import named_when_missing

_FIGURES = ("confusion_matrix.png", "learning_curve.png")  # of the model card


def train_and_save(
    settings: TrainingSettings,
    accelerator: Accelerator,
    model: PreTrainedModel,
    processor: Any,
    split: Split,
    eval_split: Split | None,
) -> dict[str, Any]:
    """Train a model and save it; return the metrics.

    With `find_batch_size`, the number of images per forward is halved until the first step fits into memory.
    """
    check_native(settings, accelerator, model, processor, split)
    set_head_bias(model, settings)
    prepare_patch_sizes(model, [*settings.patch_sizes, *settings.eval_patch_sizes])
    if settings.gradient_checkpointing:
        newer = getattr(model, "activation_checkpointing_enable", None)
        (newer or model.gradient_checkpointing_enable)()
    with claimed_output(settings, accelerator):
        per_device = settings.per_device_batch_size or max(settings.batch_size // accelerator.num_processes, 1)
        if settings.resume and (settings.find_batch_size or settings.per_device_batch_size is None):
            per_device = saved_per_device(checkpoints_of(settings)) or per_device
        while True:
            try:
                return _train_at(settings, accelerator, model, processor, split, eval_split, per_device)
            except TrainingStopped:
                raise
            except RuntimeError as error:
                if not settings.find_batch_size or per_device == 1 or not should_reduce_batch_size(error):
                    raise
                accelerator.print(f"{per_device} images per forward do not fit into memory; trying {per_device // 2}.")
                per_device //= 2
                accelerator.free_memory()
                model.zero_grad()  # gradients of the forwards that did fit


def _train_at(
    settings: TrainingSettings,
    accelerator: Accelerator,
    model: PreTrainedModel,
    processor: Any,
    split: Split,
    eval_split: Split | None,
    per_device: int,
) -> dict[str, Any]:
    """Train with `per_device` images per forward; save the model and its reports; return the metrics."""
    output = output_of(settings)
    shares = BatchLayout(settings.batch_size, per_device, accelerator.num_processes, accelerator.process_index)
    accelerator.gradient_accumulation_steps = shares.accumulation
    state = prepare_run(settings, accelerator, model, processor, split, shares)
    state.identity = fingerprint_run(settings, split)
    if settings.resume:
        resume(state)
    steps = range(state.step, state.num_steps)
    loader = training_batches(settings, split, processor, model.config, shares, steps)
    evaluate = evaluator(settings, accelerator, state, eval_split, processor, model.config)

    def facts_of_best() -> dict[str, Any]:
        return card_data(state, {**state.metrics, **state.best_evaluation()})

    keep_best = saver(accelerator, state.model, processor, output / "best", facts_of_best)
    if accelerator.is_main_process:
        write_recipe(settings)
    with named_when_missing(state.place, shares.rank, shares.processes, settings.stall_timeout):
        report = _train(state, iter(loader), evaluate, keep_best)
    if state.average is not None:
        state.average.swap(state.parameters)
    known = state.metrics if state.predictions or not isinstance(state.objective, Classification) else {}
    metrics = {**(known or evaluate()), **report.totals(state.skipped)}
    metrics |= state.best_evaluation()
    saver(accelerator, state.model, processor, output)()
    if accelerator.is_main_process:
        write_json(output / "metrics.json", metrics)
        facts = card_data(state, metrics)
        write_curve(state.history, output / "learning_curve.png")
        held_out = held_out_of(state, eval_split, model.config)
        if held_out is not None:
            facts |= write_card_results(output, held_out)
        facts["figures"] = [name for name in _FIGURES if (output / name).is_file()]
        write_json(output / "card_data.json", facts)
        if held_out is not None:
            write_run_results(output, state, held_out, facts)
    accelerator.wait_for_everyone()
    return metrics


def _train(state: Run, *arguments: Any) -> Report:
    """Call `loop.train`; a lack of memory after the first step cannot be mended by starting over."""
    first = state.step
    try:
        return train(state, *arguments)
    except RuntimeError as error:
        if state.step == first or not should_reduce_batch_size(error):
            raise
        raise TrainingStopped(
            f"memory ran out at step {state.step}: {error}; set a smaller --per-device-batch-size or --eval-batch-size"
        ) from error
    except KeyboardInterrupt:
        with suppress(Exception):  # the checkpoint that is being written; the program would wait for it at its end
            state.checkpoints.wait()
        kept = state.checkpoints.paths()
        remedy = f"{kept[-1]} is kept; run the same command with --resume to continue" if kept else "nothing was saved"
        raise KeyboardInterrupt(f"interrupted at step {state.step} of {state.num_steps}; {remedy}") from None


def run_script(page: Callable[[list[str] | None], dict[str, Any]], argv: list[str] | None = None) -> None:
    """Run a script of `training/`, with one sentence for each error.

    The exit status is 2 for an error of the user, 130 after Ctrl-C, and 75 for a run that saved and ended after SIGTERM
    or SIGUSR1.
    """
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    silence_progress_bars()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # class names that the terminal lacks end no run
    with ends_in_one_sentence("error", TrainingStopped):
        try:
            page(argv)
        except Preempted as preempted:
            processes = PartialState()
            if processes.is_main_process:
                print(preempted, file=sys.stderr)
            processes.destroy_process_group()
            raise SystemExit(preempted.status) from None
