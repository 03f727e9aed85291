"""The device's side: runs batches through mlx_lm models. Arrays live here and below only."""
