"""Cohere's route of embeddings."""
