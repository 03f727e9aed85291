"""Small nets of named layers, as their folders describe them."""
