"""vLLM's route for any result of a pooling model."""
