"""Constrained decoding: what the text of a sample must match, as masks over the vocabulary."""
