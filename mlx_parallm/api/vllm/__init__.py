"""vLLM's route from tokens to tokens."""
