"""KV blocks of other servers: asked for over HTTP, and answered."""
