"""Routes of models that read texts: vectors, classes, scores, rewards, masks."""
