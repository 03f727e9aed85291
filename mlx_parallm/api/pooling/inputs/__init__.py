"""From the fields of a body to the inputs of a pooling model."""
