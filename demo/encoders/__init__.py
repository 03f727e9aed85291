"""The small encoders in the package: their training data, training and evaluation."""
