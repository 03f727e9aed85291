"""A high-throughput OpenAI-compatible model server built on MLX."""

from mlx_parallm.llm import LLM
from mlx_parallm.request import SamplingParams

__all__ = ["LLM", "SamplingParams"]
__version__ = "0.1.0"
