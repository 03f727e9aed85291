"""Crash-safe files in a data folder, its lock, ids that sort by time, and a database."""
