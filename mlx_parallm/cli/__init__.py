"""The `mlx_parallm` command. The only package that reads flags, files and the environment."""
