"""GPU kernels of our own: two languages, and from a text and constants to a function."""
