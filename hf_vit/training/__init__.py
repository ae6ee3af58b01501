"""Training on Accelerate: models, objectives, optimizers and schedules, the loop, checkpoints and reports."""
