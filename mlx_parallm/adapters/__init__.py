"""Low-rank adapters (LoRA, DoRA) of the models that are served."""
