"""Protocols of evaluation, each a function of `(settings, accelerator)` that returns metrics, and what they share."""
