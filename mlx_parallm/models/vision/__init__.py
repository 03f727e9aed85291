"""Towers: the parts of vision-language models that turn pictures into rows of embeddings."""
