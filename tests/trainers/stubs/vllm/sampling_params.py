"""A name that TRL imports for vLLM in process."""


class StructuredOutputsParams:
    """What an in-process vLLM is asked for."""
