"""Readers of a checkpoint's files that decide how its model is used; pure Python."""
