"""Ways to evaluate a model: each module has a function `evaluate(settings, accelerator)` that returns its metrics."""
