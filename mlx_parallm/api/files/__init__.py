"""Files of clients, and batches of requests."""
