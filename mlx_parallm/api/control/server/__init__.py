"""Health, settings, and requests that are ended from outside."""
