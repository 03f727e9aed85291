"""Measures kernels and sums over ranks, for ``mlx_parallm doctor``."""
