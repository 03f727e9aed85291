"""Conversations that clients keep on the server."""
