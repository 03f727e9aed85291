"""From schemas to the engine's requests, and from events to answers; pure functions."""
