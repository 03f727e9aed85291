"""The small encoders that come with the package: what they learn from, training, evaluation."""
