"""KV blocks on a disk."""
