"""KV for other servers."""
