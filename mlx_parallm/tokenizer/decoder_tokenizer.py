"""The tokenizer of a decoder used as a pooling model, with chat and reranker templates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer
from typing_extensions import override

from mlx_parallm.template_time import at_one_time
from mlx_parallm.tokenizer.encoder_tokenizer import EncoderTokenizer
from mlx_parallm.tokenizer.tokenizer import ParallmTokenizer
from mlx_parallm.types.token_limit import ANY_LENGTH, TokenLimit

#: ``QWEN3_BEGIN``, ``QWEN3_PAIR``, ``QWEN3_INSTRUCTION`` and ``QWEN3_END``: the prompt that
#: Qwen3-Reranker was trained on, from https://huggingface.co/Qwen/Qwen3-Reranker-0.6B.
QWEN3_BEGIN = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
)
QWEN3_PAIR = "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
QWEN3_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
QWEN3_END = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"

Pairs = Sequence[tuple[str, str]]


class DecoderTokenizer(EncoderTokenizer):
    """The tokenizer of a decoder that is a pooling model.

    Args:
        chat: the folder's tokenizer in the form of models that generate.
        backend: its tokenizer of the tokenizers library.
        scores_pairs: True for a reranker: pairs are written by a template.
        instruction: the reranker's task; None: the template's own.
    """

    def __init__(
        self,
        chat: ParallmTokenizer,
        backend: Tokenizer,
        *,
        scores_pairs: bool,
        instruction: str | None = None,
    ) -> None:
        super().__init__(backend)
        self._chat = chat
        self._pairs: Callable[[Pairs, TokenLimit], list[tuple[int, ...]]] | None = None
        self._instruction = instruction
        template = chat.chat_template or ""
        # sentence-transformers' rerankers have templates of messages with these roles.
        if "query" in template and "document" in template:
            self._pairs = self._rendered
        elif scores_pairs:
            self._pairs = self._written
            self._begin, self._end = self._plain([QWEN3_BEGIN, QWEN3_END])

    @override
    def probe_template(self) -> Sequence[str]:
        """Templates of rerankers write no chats."""
        return () if self._pairs else self._chat.template_form(has_tools=False).losses

    @override
    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        limit: TokenLimit = ANY_LENGTH,
        **options: Any,
    ) -> tuple[int, ...]:
        return tuple(self._chat.encode_chat(messages, limit=limit, **options))

    @override
    def encode_pairs(
        self, pairs: Pairs, *, limit: TokenLimit = ANY_LENGTH
    ) -> list[tuple[tuple[int, ...], int | None]]:
        if self._pairs is None:
            return super().encode_pairs(pairs, limit=limit)
        return [(ids, None) for ids in self._pairs(pairs, limit)]

    def _written(self, pairs: Pairs, limit: TokenLimit) -> list[tuple[int, ...]]:
        instruction = self._instruction or QWEN3_INSTRUCTION
        texts = [
            QWEN3_PAIR.format(instruction=instruction, query=query, document=document)
            for query, document in self._fitting(pairs, limit)
        ]
        return [(*self._begin, *ids, *self._end) for ids in self._plain(texts, limit)]

    @at_one_time()
    def _rendered(self, pairs: Pairs, limit: TokenLimit) -> list[tuple[int, ...]]:
        system = [{"role": "system", "content": self._instruction}] if self._instruction else []
        texts = [
            self._chat.render_chat(
                [
                    *system,
                    {"role": "query", "content": query},
                    {"role": "document", "content": document},
                ]
            )
            for query, document in pairs
        ]
        # A template may drop its inputs, so only the rendered text shows the length.
        return self._plain(texts, limit)

    def _plain(self, texts: Sequence[str], limit: TokenLimit = ANY_LENGTH) -> list[tuple[int, ...]]:
        return self.encode(texts, add_special_tokens=False, limit=limit)
