"""What a client of a running server needs; no MLX."""

from __future__ import annotations

from mlx_parallm.client.tensors import encode_safetensors

__all__ = ["encode_safetensors"]
