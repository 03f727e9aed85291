"""Rewards of texts and conversations."""
