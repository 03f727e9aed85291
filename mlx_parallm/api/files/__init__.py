"""Files of clients."""
