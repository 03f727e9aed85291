"""Audio files to samples: what a file says of itself first, then its samples within the limits."""
