"""XLM-RoBERTa (Conneau et al., 2020, arXiv:1911.02116): RoBERTa with another vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

from mlx_parallm.models import roberta


@dataclass
class ModelArgs(roberta.ModelArgs):
    """The config of XLM-RoBERTa."""

    vocab_size: int = 30522


class Model(roberta.Model):
    """XLM-RoBERTa with the head of its first architecture; its weights have RoBERTa's names."""
