"""Elementary functions composed of stock MLX operations, for where MLX's own are slow."""
