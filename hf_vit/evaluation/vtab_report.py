"""Table and figure of VTAB-1k: tasks in the paper's order, means of the three groups, mean of all tasks."""

import statistics
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..files.output import new_file
from .vtab_data import Task

_COLORS = {"natural": "tab:red", "specialized": "tab:green", "structured": "tab:blue"}  # as in Figure 2 of the paper


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


def write_table(tasks: list[Task], columns: dict[str, dict[str, float]]) -> str:
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
    """Draw a bar for each task and a line for the mean of each group, if matplotlib is installed."""
    accuracies = {name: 100 * value for name, value in summary["accuracy"].items()}
    shown = [task for task in tasks if task.name in accuracies]
    if not find_spec("matplotlib") or not shown:
        return
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3 + 0.45 * len(shown), 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    bars = axes.bar(range(len(shown)), [accuracies[task.name] for task in shown], width=0.7)
    for bar, task in zip(bars, shown, strict=True):
        bar.set_color(_COLORS[task.group])
    axes.bar_label(bars, fmt="%.0f", fontsize=8)
    for group, mean in summary["groups"].items():
        places = [place for place, task in enumerate(shown) if task.group == group]
        ends = [places[0] - 0.45, places[-1] + 0.45]
        axes.plot(ends, [100 * mean] * 2, "--", color=_COLORS[group], label=f"{group}: {100 * mean:.1f} %")
    axes.set_xticks(range(len(shown)), [task.name for task in shown], rotation=60, ha="right")
    axes.set_ylim(0, 110)
    axes.set_ylabel("accuracy (%)")
    axes.set_title(f"VTAB-1k: {100 * summary['mean']:.1f} % over {summary['tasks_done']} tasks")
    axes.legend(loc="lower left", fontsize=8)
    with new_file(path, overwrite=True) as file:
        figure.savefig(file, dpi=120)
