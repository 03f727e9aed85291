"""Measurements against a live server; each module is one command."""
