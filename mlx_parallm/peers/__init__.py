"""The processes of one server: how they start and end, and what they send each other."""
