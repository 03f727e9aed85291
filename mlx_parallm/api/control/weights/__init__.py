"""A model's own weights while the server runs."""
