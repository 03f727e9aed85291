"""Health, settings, and aborting requests."""
