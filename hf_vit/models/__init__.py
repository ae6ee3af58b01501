"""Configurations, models and image processing. Every file of this folder travels to the Hub with a pushed model."""
