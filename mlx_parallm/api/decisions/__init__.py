"""Typed questions about an input, answered by the probabilities of labels."""
