"""Programs that use a running server."""
