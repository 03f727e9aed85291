"""Masked LMs: predictions for masks, and scores of whole texts."""
