"""What a trainer can rely on."""
