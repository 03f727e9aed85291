"""Pictures of requests: fetched, checked and decoded within limits."""
