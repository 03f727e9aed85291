"""Pooling models of ``LLM``: the paths of the server's routes, without HTTP."""
