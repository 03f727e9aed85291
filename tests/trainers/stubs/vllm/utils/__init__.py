"""Helpers of the stand-in."""
