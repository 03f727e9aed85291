"""Encoder-decoders in the form of mlx_lm's models."""
