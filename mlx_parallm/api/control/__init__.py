"""What changes the server, or tells of it."""
