"""Model folders and weights: located, loaded, replaced, and offloaded while asleep."""
