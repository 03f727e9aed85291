"""Ollama's dialect: its routes for chats, texts, embeddings and models."""
