"""Steps from gradients: an optimiser, checkpoints, and steps that are made again after them."""
