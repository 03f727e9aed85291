"""Pausing, sleeping, and emptying caches."""
