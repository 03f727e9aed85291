"""Encoder models in MLX: hidden states and the heads of their checkpoints."""
