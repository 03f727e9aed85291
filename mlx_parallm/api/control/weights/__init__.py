"""Replacing adapters and a model's own weights while the server runs."""
