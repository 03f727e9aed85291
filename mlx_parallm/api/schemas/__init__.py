"""Request and response bodies, as pydantic models and plain dicts."""
