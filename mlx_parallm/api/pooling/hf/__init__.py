"""Hugging Face's task form: what its InferenceClient posts to a model's URL, task by task.

The bodies and answers are those of https://huggingface.co/docs/inference-providers/tasks/index and
of transformers' pipelines.
"""
