"""Releasing memory and allocating it again."""
