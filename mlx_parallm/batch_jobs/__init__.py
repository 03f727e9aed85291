"""Stored files, and batches of requests answered in the background; it knows no HTTP."""
