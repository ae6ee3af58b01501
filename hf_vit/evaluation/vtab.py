"""VTAB-1k (arXiv 1910.04867): fine-tuning on 1,000 examples of each of 19 tasks.

All tasks have the same settings except augmentation: random crop and flip only where they keep the label (vtab.yaml).

The result of each finished task is kept in `output_dir/results`; the same command continues with the other tasks.
"""

import json
import shutil
import statistics
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from ..data.fingerprint import fingerprint_data, fingerprint_model
from ..data.splits import Split
from ..files.output import own_file, write_json, write_text
from ..files.reading import read_json_object
from ..files.removed_names import drop_removed_settings
from ..loading import resolve_model
from ..models.image_processing_hf_vit import PRESETS
from ..models.sizes import as_pair
from ..settings.fields import EvaluateSettings, FinetuneSettings, fields_with
from ..settings.recipes import build, merge
from ..training.build import load_for_finetuning
from ..training.trainer import Trainer, TrainingStopped
from .vtab_data import Task, TaskData, join, open_task, read_table

_SHARED = (  # fields of both EvaluateSettings and FinetuneSettings
    "image_size preset num_workers eval_batch_size mixed_precision compile compile_mode deterministic tf32 "
    "cudnn_benchmark seed".split()
)

_COLORS = {"natural": "tab:red", "specialized": "tab:green", "structured": "tab:blue"}  # as in Figure 2 of the paper


def evaluate(settings: EvaluateSettings, accelerator: Accelerator) -> dict[str, Any]:
    """Fine-tune and test on every task; return the accuracies, the means by group and the mean.

    With `--split validation`, models are trained on 800 examples and evaluated on 200.

    Raises:
        ValueError: tasks failed. It is raised after the other tasks are done.
    """
    table = read_table()
    tasks = _choose_tasks(table["tasks"], settings.tasks)
    runner = Runner(settings, accelerator, table)
    results = {task.name: result for task in tasks if (result := runner.earlier_result(task)) is not None}
    failures = []
    for task in tasks:
        if task.name not in results:
            try:
                results[task.name] = runner.run(task)
            except (ValueError, OSError, TrainingStopped) as error:
                failures.append(str(error))
                accelerator.print(f"{error}; continuing with the next task")
    report = runner.report(tasks, results, table["paper"])
    if failures:
        raise ValueError(f"{len(results)} of {len(tasks)} tasks are done, in {runner.output}; {'; '.join(failures)}")
    return report


def _choose_tasks(tasks: list[Task], names: list[str]) -> list[Task]:
    """Return the tasks with these names or folders; all if no name is given."""
    known = {name for task in tasks for name in (task.name, task.folder)}
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"unknown task {unknown[0]} (expected {', '.join(task.name for task in tasks)})")
    return [task for task in tasks if not names or task.name in names or task.folder in names]


class Runner:
    """Runner of the tasks, each with its own folder; it stores the results.

    Args:
        table: the result of `read_table`.
    """

    def __init__(self, settings: EvaluateSettings, accelerator: Accelerator, table: dict[str, Any]):
        self.settings, self.accelerator = settings, accelerator
        self.common, self.augmentation = dict(table["setting"]), table["augmentation"]
        model = str(resolve_model(str(settings.model)))
        self.output = Path(str(settings.output_dir))
        self.origin = {
            "model": fingerprint_model(model),
            "dataset": settings.dataset,
            "split": settings.split or "test",
        }

    def run(self, task: Task) -> dict[str, Any]:
        """Fine-tune on a task, evaluate, and store the result; delete the model unless `keep_models` is set."""
        started = time.perf_counter()
        data = open_task(task, str(self.settings.dataset))
        train, test = self._splits_of(data)
        self.accelerator.print(f"{task.name}: {len(train)} examples to train on, {len(test)} to evaluate on")
        settings = self.settings_of(task)
        model, processor = load_for_finetuning(settings, train)
        metrics = Trainer(settings, self.accelerator, model, processor, train, test).fit()
        self.accelerator.free_memory()
        result = {
            "task": task.name,
            **{name: metrics[name] for name in ("accuracy", "samples", "skipped")},
            "examples": "listed" if data.listed else "drawn",
            "seconds": time.perf_counter() - started,
            "made_with": self.fingerprint(task, data),
        }
        if self.accelerator.is_main_process:
            write_json(self.result_file(task), result)
            folder = self.output / task.folder
            for unneeded in (folder / "checkpoints", folder / "best") if self.settings.keep_models else (folder,):
                shutil.rmtree(unneeded)
        self.accelerator.wait_for_everyone()
        return result

    def settings_of(self, task: Task) -> FinetuneSettings:
        """Return the paper's settings with the task's augmentation and the user's changes."""
        folder = self.output / task.folder
        values = {**self.common, **self.augmentation[task.augmentation]}
        given = {name: getattr(self.settings, name) for name in _SHARED}
        values |= {name: value for name, value in given.items() if value is not None}
        values = merge(values, self.settings.finetune)
        if "resize" not in self.settings.finetune:
            share = self.common["resize"] / self.common["image_size"]
            values["resize"] = [round(side * share) for side in as_pair(values["image_size"])]
        values |= {"model": self.settings.model, "dataset": task.name, "output_dir": str(folder), "report_to": "none"}
        if steps := values.get("steps"):
            # Evaluate on the test images only at the end
            values = {"eval_every": steps, "save_every": max(steps // 5, 1), **values}
        resume = (folder / "checkpoints").is_dir() and not self.settings.overwrite
        return build(FinetuneSettings, {**values, "resume": resume, "overwrite": not resume})

    def _splits_of(self, data: TaskData) -> tuple[Split, Split]:
        """Return the training and test splits."""
        if self.settings.split == "validation":
            return data.train, data.validation
        return join(data.train, data.validation), data.test

    def fingerprint(self, task: Task, data: TaskData) -> dict[str, Any]:
        """Return everything that a result depends on."""
        settings = self.settings_of(task)
        free = {*fields_with("free_on_resume", settings), "model"}
        values = {name: value for name, value in asdict(settings).items() if name not in free}
        train, test = (fingerprint_data(split) for split in self._splits_of(data))
        decoding = PRESETS[values["preset"]].jpeg_dct if values["preset"] else "of the model"
        return {**self.origin, "train": train, "test": test, "finetune": values, "jpeg_dct": decoding}

    def result_file(self, task: Task) -> Path:
        """Return the file with the result of a task."""
        return self.output / "results" / f"{task.folder}.json"

    def earlier_result(self, task: Task) -> dict[str, Any] | None:
        """Return the result of a task from an earlier run, if there is one.

        Raises:
            ValueError: it was made with a different model, data or settings.
        """
        file = self.result_file(task)
        if self.settings.overwrite or not file.exists():
            return None
        result = read_json_object(file)
        try:
            data = open_task(task, str(self.settings.dataset))
        except ValueError as error:
            self.accelerator.print(f"{error}; the result in {file} is used without checking its data")
            return result
        current, saved = json.loads(json.dumps(self.fingerprint(task, data))), result["made_with"]
        saved["finetune"] = asdict(FinetuneSettings()) | drop_removed_settings(saved["finetune"])
        saved["finetune"] = {name: saved["finetune"][name] for name in current["finetune"]}
        if changed := [name for name in current if saved.get(name) != current[name]]:
            raise ValueError(
                f"{file} was made with other settings or data (its made_with differs in {', '.join(changed)}): choose "
                "another --output-dir, or replace it with --overwrite"
            )
        return result

    def report(self, tasks: list[Task], results: dict[str, dict[str, Any]], paper: dict) -> dict[str, Any]:
        """Write vtab.json, vtab.md and vtab.png for the finished tasks; return the summary."""
        accuracies = {task.name: results[task.name]["accuracy"] for task in tasks if task.name in results}
        drawn = [name for name in accuracies if results[name]["examples"] == "drawn"]
        summary = {**summarize(tasks, accuracies), "drawn_examples": drawn}
        if self.accelerator.is_main_process:
            self.output.mkdir(parents=True, exist_ok=True)
            write_json(self.output / "vtab.json", summary)
            columns = {Path(str(self.settings.model)).name: accuracies, **paper}
            write_text(self.output / "vtab.md", markdown_table(tasks, columns))
            write_figure(tasks, summary, self.output / "vtab.png")
        return summary


def summarize(tasks: list[Task], accuracies: dict[str, float]) -> dict[str, Any]:
    """Return the accuracies of the finished tasks, their means by group and over all tasks.

    The mean over all tasks is over the tasks, not over the groups (Table 9 of arXiv 2010.11929).
    """
    groups = {}
    for group in dict.fromkeys(task.group for task in tasks):
        done = [accuracies[task.name] for task in tasks if task.group == group and task.name in accuracies]
        groups |= {group: statistics.mean(done)} if done else {}
    mean = {"mean": statistics.mean(accuracies.values())} if accuracies else {}
    return {"accuracy": accuracies, "groups": groups, **mean, "tasks_done": len(accuracies), "tasks": len(tasks)}


def markdown_table(tasks: list[Task], columns: dict[str, dict[str, float]]) -> str:
    """Return a Markdown table: a row for each task, the groups and the mean; a column for each model, in %.

    Args:
        columns: name of a model -> name of a task -> accuracy from 0 to 1; a missing task is a dash.
    """
    summaries = [summarize(tasks, accuracies) for accuracies in columns.values()]
    lines = [["task", "group", *columns], ["---", "---", *("--:" for _ in columns)]]
    for task in tasks:
        lines.append([task.name, task.group, *(_percent(column["accuracy"].get(task.name)) for column in summaries)])
    for group in dict.fromkeys(task.group for task in tasks):
        lines.append([f"**mean of {group}**", "", *(_percent(column["groups"].get(group)) for column in summaries)])
    lines.append(["**mean of all tasks**", "", *(_percent(column.get("mean")) for column in summaries)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _percent(accuracy: float | None) -> str:
    return "-" if accuracy is None else f"{100 * accuracy:.1f}"


def write_figure(tasks: list[Task], summary: dict[str, Any], path: Path):
    """Draw a bar chart of the tasks, with a line for the mean of each group."""
    accuracies = {name: 100 * value for name, value in summary["accuracy"].items()}
    shown = [task for task in tasks if task.name in accuracies]
    if not shown:
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3 + 0.45 * len(shown), 4), layout="constrained")
    axes = figure.subplots()
    heights, colors = [accuracies[task.name] for task in shown], [_COLORS[task.group] for task in shown]
    bars = axes.bar(range(len(shown)), heights, color=colors)
    axes.bar_label(bars, fmt="%.0f", fontsize=8)
    for group, mean in summary["groups"].items():
        numbers = [number for number, task in enumerate(shown) if task.group == group]
        ends = [numbers[0] - 0.45, numbers[-1] + 0.45]
        axes.plot(ends, [100 * mean] * 2, "--", color=_COLORS[group], label=f"{group}: {100 * mean:.1f}%")
    axes.set_xticks(range(len(shown)), [task.name for task in shown], rotation=60, ha="right")
    axes.set_ylim(0, 110)
    axes.set_ylabel("accuracy (%)")
    axes.set_title(f"VTAB-1k: {100 * summary['mean']:.1f}% over {summary['tasks_done']} tasks")
    axes.legend(loc="lower left", fontsize=8)
    with own_file(path) as file:
        figure.savefig(file, dpi=120)
