"""vLLM's route for whatever a pooling model gives."""
