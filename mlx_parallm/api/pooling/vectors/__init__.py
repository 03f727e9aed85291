"""Vectors, probabilities of labels and moderations: OpenAI's and vLLM's routes."""
