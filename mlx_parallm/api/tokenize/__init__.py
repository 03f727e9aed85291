"""Texts to tokens and back."""
