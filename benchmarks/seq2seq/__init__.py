"""Benchmarks of encoder-decoders."""
