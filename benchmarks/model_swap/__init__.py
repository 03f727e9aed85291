"""Measures models that come and go beside running streams."""
