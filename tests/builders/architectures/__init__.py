"""Small configurations of every architecture that mlx_lm has."""
