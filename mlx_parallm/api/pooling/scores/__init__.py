"""Scores of texts: rerankers, pairs, labels and rewards."""
