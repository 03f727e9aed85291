"""Which sequences run in the next step. Pure Python."""
