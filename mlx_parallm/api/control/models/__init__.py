"""Listing, loading and unloading models."""
