"""Gradients of losses with respect to a trainable adapter, through the served model itself."""
