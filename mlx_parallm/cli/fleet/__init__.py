"""The command ``mlx_parallm fleet``."""
