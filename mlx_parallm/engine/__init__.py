"""The engine thread: it takes requests, steps every model and sends events back."""
