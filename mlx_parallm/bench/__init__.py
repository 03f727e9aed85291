"""The load client behind `mlx_parallm bench`."""
