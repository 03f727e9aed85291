"""Runs batches of texts through encoders and decoders, and applies their heads."""
