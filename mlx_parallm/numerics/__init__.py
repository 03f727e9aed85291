"""Faster elementary functions than MLX's, the search for infinite weights, and fits of costs."""
