"""The command ``mlx_parallm chat``: a conversation in the terminal."""
