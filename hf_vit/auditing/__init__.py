"""Audit of a dataset: label errors, duplicates, leaks, outliers, and images of poor quality."""
