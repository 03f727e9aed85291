"""Benchmarks of speech."""
