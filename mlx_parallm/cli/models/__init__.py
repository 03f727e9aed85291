"""The command ``mlx_parallm models``: models on this machine, and in a running server."""
