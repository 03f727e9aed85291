"""Several engines and HTTP processes that are killed while they serve."""
