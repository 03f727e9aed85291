"""Parsers of tool calls, a module for each family of models."""
