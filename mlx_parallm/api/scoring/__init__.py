"""Scores of texts: of pairs by relevance, and rewards."""
