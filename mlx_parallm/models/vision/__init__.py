"""Towers: the parts of vision-language models that turn images into rows of embeddings."""
