"""Models that generate: which sequences run next, their KV blocks, and speculation."""
