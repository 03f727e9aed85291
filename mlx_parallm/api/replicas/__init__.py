"""Servers that change together."""
