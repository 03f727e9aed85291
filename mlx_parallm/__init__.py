"""A high-throughput OpenAI-compatible model server built on MLX."""

__version__ = "0.1.0"
