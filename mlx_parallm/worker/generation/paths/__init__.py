"""The ways a forward can run; the self-check at load chooses one."""
