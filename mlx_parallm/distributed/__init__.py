"""Several processes that compute one model: rank 0 decides, the other ranks repeat its ops."""
