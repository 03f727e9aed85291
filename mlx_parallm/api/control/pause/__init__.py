"""Pausing, resuming and emptying caches."""
