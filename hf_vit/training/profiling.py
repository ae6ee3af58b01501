"""Trace of some optimiser steps, with torch's profiler."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity

from ..files.output import new_file

_WARM_UP = 5  # largest number of steps before the trace: they compile, allocate and fill the loader


class Profiler:
    """Trace of optimiser steps on the main process.

    Args:
        steps: number of steps, at most `steps_left`; None: no trace.
        steps_left: remaining steps of the run.
        folder: folder of trace.json.
        say: called with a message about the file.
    """

    def __init__(self, steps: int | None, steps_left: int, folder: Path, say: Callable[[str], None]):
        self.profile = None
        if steps is None or steps_left < 1:
            return
        self.folder, self.say = folder, say
        steps = min(steps, steps_left)
        warm_up = min(_WARM_UP, steps_left - steps)
        self.profile = torch.profiler.profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])],
            schedule=torch.profiler.schedule(wait=0, warmup=warm_up, active=steps, repeat=1),
            on_trace_ready=self._write,
            record_shapes=True,
        )
        self.profile.start()

    def step(self) -> None:
        """Record the end of an optimiser step."""
        if self.profile is not None:
            self.profile.step()

    def stop(self) -> None:
        """Stop the trace."""
        if self.profile is not None:
            self.profile.stop()
            self.profile = None

    def _write(self, profile: torch.profiler.profile) -> None:
        file = self.folder / "trace.json"
        self.folder.mkdir(parents=True, exist_ok=True)
        with new_file(file, overwrite=True) as draft:
            profile.export_chrome_trace(str(draft))
        self.say(f"The trace is {file}: open it in https://ui.perfetto.dev or chrome://tracing.")
