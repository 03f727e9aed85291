"""Load on a live server, with every answer checked."""
