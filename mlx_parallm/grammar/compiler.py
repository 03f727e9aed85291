"""Compiles specifications into checked grammars, and grammars into matchers."""

from __future__ import annotations

import functools
import json
import threading
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

from llguidance import LLMatcher

from mlx_parallm.grammar.lark import (
    LarkBuilder,
    inner_tokens,
    json_schema_grammar,
    lark_grammar,
    lark_of_either,
    lark_of_gbnf,
    regex_grammar,
)
from mlx_parallm.grammar.spec import GrammarKind, GrammarSpec
from mlx_parallm.grammar.structural_tag import structural_tag_grammar
from mlx_parallm.grammar.vocabulary import GrammarVocabulary
from mlx_parallm.types.errors import InvalidRequestError

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

# Bounds of the caches of compiled grammars.
MAX_CACHED = 256
MAX_CACHED_CHARS = 4 << 20
# COMPILE_THREADS are for all clients together: they must leave cores to the model.
COMPILE_THREADS = 2
MAX_MESSAGE_CHARS = 500


class GrammarCompiler:
    """Compiles grammars for one model's tokens. It is thread-safe."""

    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        self.vocabulary = vocabulary
        self._lock = threading.Lock()
        self._texts = BoundedCache[GrammarSpec, str](MAX_CACHED, MAX_CACHED_CHARS)
        self._matchers = BoundedCache[str, LLMatcher](MAX_CACHED, MAX_CACHED_CHARS)

    def __reduce__(self) -> tuple[type[GrammarCompiler], tuple[GrammarVocabulary]]:
        """Pickle the vocabulary alone; the copy compiles grammars again."""
        return GrammarCompiler, (self.vocabulary,)

    def known(self, spec: GrammarSpec) -> str | None:
        """Return the grammar's text if it was compiled lately; else None."""
        with self._lock:
            return self._texts.get(spec)

    def submit(self, spec: GrammarSpec) -> Future[str]:
        """Run ``compile`` on a thread of its own."""
        return self._threads.submit(self.compile, spec)

    def compile(self, spec: GrammarSpec) -> str:
        """Return a specification in llguidance's JSON form, after checking it.

        Raises:
            InvalidRequestError: it is wrong, unsupported, or too much work; without ``param``.
        """
        known = self.known(spec)
        if known is not None:
            return known
        # Without a vocabulary the special tokens are unknown.
        self.vocabulary.check()
        grammar = self._grammar(spec)
        self._check_ends(grammar)
        text = json.dumps(grammar, ensure_ascii=False)
        matcher = self.vocabulary.matcher(text)
        # The first mask builds what is lazy, which the first token of every sample needs.
        matcher.compute_bitmask()
        if matcher.is_error():
            raise InvalidRequestError(_explain(matcher.get_error()))
        with self._lock:
            self._texts.put(spec, text, len(spec.text))
            self._matchers.put(text, matcher, len(text))
        return text

    def matcher(self, text: str) -> LLMatcher:
        """Return a new matcher for one sample; it is in its error state if the text is wrong."""
        with self._lock:
            known = self._matchers.get(text)
            if known is not None:
                return known.deep_copy()
        matcher = self.vocabulary.matcher(text)
        with self._lock:
            self._matchers.put(text, matcher, len(text))
            return matcher.deep_copy()

    @functools.cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(COMPILE_THREADS, thread_name_prefix="grammar")

    def submit_starts(self, text: str, beginnings: tuple[str, ...]) -> Future[tuple[str, ...]]:
        """Return those beginnings for which ``starts`` is true, from a thread."""
        return self._threads.submit(
            lambda: tuple(each for each in beginnings if self.starts(text, each))
        )

    def starts(self, text: str, beginning: str) -> bool:
        """True if what a compiled grammar matches may start with these characters.

        They are tried one by one: as a whole they may be a token that has no place in a text.
        """
        tokens = [
            token_id
            for character in beginning
            for token_id in self.vocabulary.tokens_of(character.encode())
        ]
        return self.matcher(text).try_consume_tokens(tokens) == len(tokens)

    def any_text_after(self, beginnings: Sequence[str]) -> LLMatcher:
        """Return a matcher of any text after one of these, whose special tokens are tokens."""
        builder = LarkBuilder(self.vocabulary.specials)
        either = " | ".join(map(builder.literal, beginnings))
        start = f"({either}) {builder.text_until('')}"
        return self.matcher(json.dumps(builder.grammar(start), ensure_ascii=False))

    def _check_ends(self, grammar: Mapping[str, Any]) -> None:
        """Refuse a grammar that goes on after a token that ends the answer."""
        eos_ids = self.vocabulary.eos_ids
        named = {text for text, token in self.vocabulary.specials.items() if token in eos_ids}
        ends = named | set(map(str, eos_ids))
        for part in grammar["grammars"]:
            for token in inner_tokens(part.get("lark_grammar") or ""):
                if token in ends:
                    raise InvalidRequestError(f"The grammar goes on after {token}, an end token.")

    def _grammar(self, spec: GrammarSpec) -> dict[str, Any]:
        builder = LarkBuilder()
        match spec.kind:
            case GrammarKind.JSON_SCHEMA | GrammarKind.LENIENT_JSON_SCHEMA:
                lenient = spec.kind is GrammarKind.LENIENT_JSON_SCHEMA
                grammar = json_schema_grammar(spec.text, lenient=lenient)
            case GrammarKind.REGEX:
                grammar = regex_grammar(spec.text)
            case GrammarKind.CHOICE:
                options = [builder.literal(option) for option in json.loads(spec.text)]
                return builder.grammar(" | ".join(options))
            case GrammarKind.STRUCTURAL_TAG:
                return structural_tag_grammar(spec.text, self.vocabulary.markers)
            case GrammarKind.GBNF:
                grammar = {"lark_grammar": lark_of_gbnf(spec.text)}
            case GrammarKind.EITHER:
                grammar = lark_grammar(lark_of_either(spec.text))
            case GrammarKind.LARK:
                grammar = lark_grammar(spec.text)
        return builder.grammar(builder.other(grammar))


class BoundedCache(Generic[K, V]):
    """Evicts the least recently used values when they are too many or too large."""

    def __init__(self, max_values: int, max_size: int) -> None:
        self._max_values = max_values
        self._max_size = max_size
        self._size = 0
        self._values: OrderedDict[K, tuple[V, int]] = OrderedDict()

    def __len__(self) -> int:
        """Return the number of values."""
        return len(self._values)

    def get(self, key: K) -> V | None:
        """Return the value of a key and count it as used; None if there is none."""
        entry = self._values.get(key)
        if entry is None:
            return None
        self._values.move_to_end(key)
        return entry[0]

    def put(self, key: K, value: V, size: int) -> None:
        """Cache a value, unless it alone is larger than the whole cache."""
        if key in self._values:
            self._size -= self._values.pop(key)[1]
        if size > self._max_size:
            return
        self._values[key] = (value, size)
        self._size += size
        while len(self._values) > self._max_values or self._size > self._max_size:
            self._size -= self._values.popitem(last=False)[1][1]


def _explain(error: str) -> str:
    """Return the message to a client for an error of llguidance."""
    text = error.replace("<non-verbose/>", "").strip()
    if text.startswith("NoExtension"):
        text = "nothing can match it"
    return f"The grammar cannot be used: {text[:MAX_MESSAGE_CHARS]}"
