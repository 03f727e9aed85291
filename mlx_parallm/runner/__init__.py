"""Runs scheduled batches through unmodified mlx_lm models. Arrays live here and below only."""
