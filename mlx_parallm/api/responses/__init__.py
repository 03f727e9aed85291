"""Responses that are kept, and those that are made in the background."""
