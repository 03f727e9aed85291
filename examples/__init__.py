"""Example programs that use a running server."""
