"""Readers of a checkpoint's settings for late interaction.

ColBERT (Khattab & Zaharia 2020, https://arxiv.org/abs/2004.12832) marks queries and documents by a
token each, pads queries with mask tokens, and leaves punctuation out of documents. Three kinds of
folders have such settings: Stanford's (``HF_ColBERT`` with ``artifact.metadata``), PyLate's (in
``config_sentence_transformers.json``), and those of sentence-transformers from version 6 on (in
the settings of the transformer and of ``MultiVectorMask``).
"""

from __future__ import annotations

import string
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlx_parallm.models.checkpoints.sentence_transformers import (
    is_stanford_colbert,
    module_kind,
    read_fields,
    read_json,
    transformer_folder,
)
from mlx_parallm.types.errors import ModelLoadError
from mlx_parallm.types.pooling import LateInteraction

# QUERY_LENGTH: the default of both Stanford's ColBERT and PyLate.
QUERY_LENGTH = 32
DOCUMENT_LENGTH = 180
PYLATE_FIELDS = frozenset(
    {
        *("query_length", "document_length", "query_expansion", "do_query_expansion"),
        *("attend_to_expansion_tokens", "query_prefix", "document_prefix", "skiplist_words"),
    }
)
PUNCTUATION = tuple(string.punctuation)


@dataclass(frozen=True, slots=True, kw_only=True)
class LateSpec:
    """A ``LateInteraction`` with tokens as text instead of ids.

    Attributes:
        query_prefix: text that marks a query; empty: none.
        document_prefix: text that marks a document; empty: none.
        expansion_token: the padding of queries; None: the mask token, else the end token.
        skipped: tokens of documents that are not compared.
        settings: the settings that need no tokenizer.
    """

    query_prefix: str = ""
    document_prefix: str = ""
    expansion_token: str | None = None
    skipped: tuple[str, ...] = ()
    settings: LateInteraction = field(default_factory=LateInteraction)


def read_late_spec(folder: Path) -> LateSpec:
    """Return a folder's settings; without any, queries and documents are plain texts.

    Raises:
        ModelLoadError: a file cannot be read, or asks for an unsupported feature.
    """
    if is_stanford_colbert(folder):
        return _stanford(read_fields(folder / "artifact.metadata"))
    settings = read_fields(folder / "config_sentence_transformers.json")
    is_mean = settings.get("similarity_fn_name") == "meanmaxsim"
    if settings.get("model_type") == "ColBERT" or PYLATE_FIELDS & settings.keys():
        return _pylate(settings)
    own = read_fields(transformer_folder(folder) / "sentence_bert_config.json")
    skipped: tuple[str, ...] = ()
    skips_in_queries = False
    for module in read_json(folder / "modules.json") or ():
        if module_kind(module) == "MultiVectorMask":
            file = folder / str(module["path"]) / "config.json"
            skipped, skips_in_queries = _mask(file, read_fields(file))
    expansion: Mapping[str, Any] = own.get("query_expansion") or {}
    return LateSpec(
        expansion_token=expansion.get("token"),
        skipped=skipped,
        settings=LateInteraction(
            query_length=expansion["length"]
            if expansion.get("strategy") == "fixed"
            else own.get("query_length"),
            document_length=own.get("document_length"),
            expands_to=expansion.get("length", 0),
            attends_to_expansion=bool(expansion.get("attend")),
            skips_in_queries=skips_in_queries,
            is_mean=is_mean,
        ),
    )


def _stanford(metadata: Mapping[str, Any]) -> LateSpec:
    length = metadata.get("query_maxlen") or QUERY_LENGTH
    return LateSpec(
        query_prefix=metadata.get("query_token_id") or "[unused0]",
        document_prefix=metadata.get("doc_token_id") or "[unused1]",
        skipped=PUNCTUATION if metadata.get("mask_punctuation", True) else (),
        settings=LateInteraction(
            query_length=length,
            document_length=metadata.get("doc_maxlen") or DOCUMENT_LENGTH,
            expands_to=length,
            attends_to_expansion=bool(metadata.get("attend_to_mask_tokens")),
        ),
    )


def _pylate(settings: Mapping[str, Any]) -> LateSpec:
    length = settings.get("query_length") or QUERY_LENGTH
    expands = settings.get("do_query_expansion") is not False
    skipped = settings.get("skiplist_words")
    return LateSpec(
        query_prefix=settings.get("query_prefix") or "",
        document_prefix=settings.get("document_prefix") or "",
        skipped=PUNCTUATION if skipped is None else tuple(skipped),
        settings=LateInteraction(
            query_length=length,
            document_length=settings.get("document_length") or DOCUMENT_LENGTH,
            expands_to=length if expands else 0,
            attends_to_expansion=bool(settings.get("attend_to_expansion_tokens")),
        ),
    )


def _mask(file: Path, config: Mapping[str, Any]) -> tuple[tuple[str, ...], bool]:
    """Return the words that are not compared, and True if they are skipped in queries too."""
    if config.get("keep_only_token_ids"):
        raise ModelLoadError(f"{file}: keep_only_token_ids is not supported.")
    tasks = config.get("skiplist_tasks", ["document"])
    if "document" not in tasks:
        raise ModelLoadError(f"{file}: a skiplist of {tasks} is not supported.")
    return tuple(config.get("skiplist_words") or ()), "query" in tasks
