"""Tokenizers with the chat templates of the corpus, without their vocabularies."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from mlx_parallm.parsing.forced import call_writer
from mlx_parallm.parsing.registry import detect_tool_format
from mlx_parallm.tokenizer.jinja_chat import JinjaChat, PlainTokenizer
from mlx_parallm.tokenizer.loaded import LoadedTokenizer
from mlx_parallm.tokenizer.tokenizer import ParallmTokenizer
from tests.corpus.fetch import unpacked
from tests.corpus.sources import LLAMA_CPP, VLLM

SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}


def templates() -> Iterator[tuple[str, Path]]:
    """Yield the chat templates of the corpus by name."""
    for source in (LLAMA_CPP, VLLM):
        folder = unpacked(source)
        for file in sorted(folder.rglob("*.jinja")):
            yield f"{source.name}/{file.stem}", file


def with_template(template: str) -> ParallmTokenizer:
    """Return a tokenizer of bytes that has a chat template."""
    vocabulary = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    backend.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    plain = PlainTokenizer(backend, JinjaChat(template, SPECIAL_TOKENS))
    tokenizer = ParallmTokenizer(
        LoadedTokenizer(
            class_name="bytes",
            library="tokenizers",
            renderer=plain,
            hub=plain,
            encoder=backend,
            decoder=backend,
            chat=plain,
            has_chat_template=True,
            eos_ids=frozenset(),
        )
    )
    return tokenizer.writing_calls(call_writer(detect_tool_format(template, ())))
