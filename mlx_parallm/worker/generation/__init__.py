"""Runs scheduled batches of generating models, by the path chosen at load."""
