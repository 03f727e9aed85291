"""Stands in for vLLM where there is no CUDA; see README.md beside this folder."""

__version__ = "0.31.0"


class LLM:
    """vLLM in process, which needs CUDA."""


class RequestOutput:
    """The type of what an in-process vLLM returns."""


class SamplingParams:
    """The type of an in-process vLLM's settings."""
