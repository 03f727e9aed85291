"""Models cut into the parts of several ranks, which compute them together (tensor parallel)."""
