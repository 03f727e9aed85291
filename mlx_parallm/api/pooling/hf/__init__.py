"""Hugging Face's task form: the requests of its InferenceClient to a model's URL, by task.

The bodies and answers are those of https://huggingface.co/docs/inference-providers/tasks/index and
of transformers' pipelines.
"""
