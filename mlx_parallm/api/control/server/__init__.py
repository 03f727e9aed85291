"""The server itself: health, settings, models, load, and aborting requests."""
