"""Tokens that control a speech model: languages, tasks, timestamps."""
