"""Model folders and weights: found, loaded, replaced, and put away for a while."""
