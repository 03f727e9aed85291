"""Adapters applied per row: slots, stacked tensors, and the layers that use them."""
