"""A training session of a masked LM over HTTP: sentiment with label words."""
