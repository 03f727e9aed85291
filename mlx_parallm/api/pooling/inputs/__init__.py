"""From the inputs of a body to those of a pooling model."""
