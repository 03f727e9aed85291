"""vLLM's token-in, token-out route."""
