"""From the text of an assistant's turn to its parts: reasoning, content and tool calls."""
