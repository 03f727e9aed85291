"""A reward model from preferences, and GRPO whose samples it scores, on one server."""
