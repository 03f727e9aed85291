"""Images of requests: fetched, checked and decoded within limits."""
