"""Adapters while the server runs."""
