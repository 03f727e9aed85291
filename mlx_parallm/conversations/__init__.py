"""Conversations and chats that clients store: they outlive the server's process."""
