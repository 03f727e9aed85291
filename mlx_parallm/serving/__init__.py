"""The kinds of models that are served, and the engine as its clients see it."""
