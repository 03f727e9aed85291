"""One module for each way of writing tool calls."""
