"""Training by forward passes: perturbed copies of trainable factors, and what they may share."""
