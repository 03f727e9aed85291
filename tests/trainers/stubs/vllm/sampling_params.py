"""A name that TRL imports for vLLM in process."""


class StructuredOutputsParams:
    """The type of an in-process vLLM's settings of structured output."""
