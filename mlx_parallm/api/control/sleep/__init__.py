"""Giving memory back and having it again."""
