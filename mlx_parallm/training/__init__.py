"""Training by forward passes: what a step tries, what it learns from the losses, and its log."""
