"""Batches of requests, which are answered in the background."""
