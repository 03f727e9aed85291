"""Layers computed faster than MLX's or mlx_lm's own, with the same results."""
