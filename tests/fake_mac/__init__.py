"""A Mac with Apple Silicon that is none, for tests on Linux; see ``mac.py``."""
