"""Training and evaluation on Accelerate: settings, data, optimisers and schedules, the loop, checkpoints, metrics."""
