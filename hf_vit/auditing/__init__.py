"""Audit of a data set: label errors, duplicates, leaks, outliers, and images of poor quality."""
