"""Training on Accelerate: models, objectives, optimisers and schedules, the loop, checkpoints and reports."""
