"""OpenAI's moderations."""
