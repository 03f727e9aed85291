"""One turn of an assistant, whatever protocol asked for it."""
