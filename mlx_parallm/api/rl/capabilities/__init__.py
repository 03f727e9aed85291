"""Facts that a trainer can rely on."""
