"""vLLM's classification."""
