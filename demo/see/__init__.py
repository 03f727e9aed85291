"""A small model that answers questions about drawn pictures: its data, training, evaluation."""
