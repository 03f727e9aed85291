"""Elementary functions from stock MLX operations, for devices where MLX's own are slow."""
