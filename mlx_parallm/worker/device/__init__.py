"""The device of this process: what it is, its memory, and checks of kernels on it."""
