"""The engine of models that read texts: their queue, their memory, and who asks them."""
