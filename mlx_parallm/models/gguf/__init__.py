"""GGUF files: their header, and folders in Hugging Face's form that are made from them."""
