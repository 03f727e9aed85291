"""Measures kernels on the default device, for ``mlx_parallm doctor``."""
