"""Encoder models in MLX, with the heads of their checkpoints."""
