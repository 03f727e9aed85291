"""Tokenizers, which turn text into tokens and back, and chat templates."""
