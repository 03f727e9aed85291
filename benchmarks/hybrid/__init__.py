"""Benchmarks of chats with models that keep a state."""
