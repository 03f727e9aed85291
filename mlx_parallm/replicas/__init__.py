"""Servers of one model that change together."""
