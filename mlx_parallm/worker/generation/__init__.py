"""Runs scheduled batches of generation models, by the path chosen at load."""
