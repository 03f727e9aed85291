"""Rewrites JSON schemas into keywords that llguidance can enforce."""
