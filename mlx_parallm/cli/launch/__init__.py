"""The command ``mlx_parallm launch``: coding agents and Open WebUI with a server."""
