"""The embedded demonstration model: its data, training, evaluation and files."""
