"""Prepares a process before MLX is imported, which fixes for its life what it reads then."""
