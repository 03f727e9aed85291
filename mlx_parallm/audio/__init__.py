"""Audio as speech models take it: features, windows of 30 s, and segments with times."""
