"""Inputs besides tokens: their rows, how these are computed, and forwards with them."""
