"""Crash-safe files in a data folder, and ids that sort by time; for batches and training."""
