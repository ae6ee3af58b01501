"""Data sets for training and evaluation: opened, decoded, augmented, sampled and batched."""
