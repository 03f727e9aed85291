"""Training beside serving: sessions with their files, and what makes their steps."""
