"""Parsers that split the text of an assistant's turn into reasoning, content and tool calls."""
