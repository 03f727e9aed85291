"""Encoders in MLX with the heads of their checkpoints, and decoders that mlx_lm lacks."""
