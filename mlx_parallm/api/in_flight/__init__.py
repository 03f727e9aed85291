"""Adapters that ART replaces while they generate, and what it is told of their tokens."""
