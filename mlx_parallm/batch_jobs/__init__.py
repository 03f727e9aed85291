"""Stored files, and batches of requests that are answered in the background; knows no HTTP."""
