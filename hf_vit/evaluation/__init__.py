"""Protocols of evaluation; each module has a function `evaluate(settings, accelerator)` that returns metrics."""
