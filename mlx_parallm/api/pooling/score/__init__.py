"""Scores of pairs and of labels: vLLM and SGLang."""
