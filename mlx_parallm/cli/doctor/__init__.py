"""The command ``mlx_parallm doctor``, which reports on this installation and gives advice."""
