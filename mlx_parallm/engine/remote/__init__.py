"""Engines in a process of their own: the same commands and events, over a socket."""
