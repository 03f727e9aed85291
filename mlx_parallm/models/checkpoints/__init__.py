"""What the files of a checkpoint say about how a model is read; pure Python."""
