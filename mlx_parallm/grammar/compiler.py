"""From a specification to a grammar that was checked, and from a grammar to matchers."""

from __future__ import annotations

import functools
import json
import threading
from collections import OrderedDict
from collections.abc import Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

from llguidance import LLMatcher

from mlx_parallm.grammar.lark import (
    LarkBuilder,
    json_schema_grammar,
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

# What is kept of grammars that were compiled.
MAX_CACHED = 256
MAX_CACHED_CHARS = 4 << 20
# At a time, for all clients: a grammar's threads must leave cores to the model.
COMPILE_THREADS = 2
MAX_MESSAGE_CHARS = 500


class GrammarCompiler:
    """Compiles grammars for one model's tokens. Safe from any thread."""

    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        self.vocabulary = vocabulary
        self._lock = threading.Lock()
        self._texts = BoundedCache[GrammarSpec, str](MAX_CACHED, MAX_CACHED_CHARS)
        self._matchers = BoundedCache[str, LLMatcher](MAX_CACHED, MAX_CACHED_CHARS)

    def __reduce__(self) -> tuple[type[GrammarCompiler], tuple[GrammarVocabulary]]:
        """Pickle the vocabulary alone: what was compiled is compiled again."""
        return GrammarCompiler, (self.vocabulary,)

    def known(self, spec: GrammarSpec) -> str | None:
        """The grammar's text if it was compiled lately."""
        with self._lock:
            return self._texts.get(spec)

    def submit(self, spec: GrammarSpec) -> Future[str]:
        """``compile`` on a worker thread."""
        return self._threads.submit(self.compile, spec)

    def compile(self, spec: GrammarSpec) -> str:
        """A specification in llguidance's JSON form, checked.

        Raises:
            InvalidRequestError: it is wrong, unsupported, or too much work; without ``param``.
        """
        known = self.known(spec)
        if known is not None:
            return known
        # Nothing can be said of special tokens before.
        self.vocabulary.check()
        text = json.dumps(self._grammar(spec), ensure_ascii=False)
        matcher = self.vocabulary.matcher(text)
        # What is lazy is made by the first mask, which the first token of every sample needs.
        matcher.compute_bitmask()
        if matcher.is_error():
            raise InvalidRequestError(_explain(matcher.get_error()))
        with self._lock:
            self._texts.put(spec, text, len(spec.text))
            self._matchers.put(text, matcher, len(text))
        return text

    def matcher(self, text: str) -> LLMatcher:
        """A matcher of its own for one sample; in its error state if the text is no grammar."""
        with self._lock:
            known = self._matchers.get(text)
            if known is not None:
                return known.deep_copy()
        made = self.vocabulary.matcher(text)
        with self._lock:
            self._matchers.put(text, made, len(text))
            return made.deep_copy()

    @functools.cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(COMPILE_THREADS, thread_name_prefix="grammar")

    def _grammar(self, spec: GrammarSpec) -> dict[str, Any]:
        specials = self.vocabulary.specials
        match spec.kind:
            case GrammarKind.JSON_SCHEMA | GrammarKind.LENIENT_JSON_SCHEMA:
                lenient = spec.kind is GrammarKind.LENIENT_JSON_SCHEMA
                one = json_schema_grammar(spec.text, lenient=lenient)
            case GrammarKind.REGEX:
                one = regex_grammar(spec.text)
            case GrammarKind.CHOICE:
                builder = LarkBuilder(specials)
                options = [builder.literal(option) for option in json.loads(spec.text)]
                return builder.grammar(" | ".join(options))
            case GrammarKind.STRUCTURAL_TAG:
                return structural_tag_grammar(spec.text, specials)
            case GrammarKind.GBNF:
                one = {"lark_grammar": lark_of_gbnf(spec.text)}
            case GrammarKind.EITHER:
                one = {"lark_grammar": lark_of_either(spec.text)}
            case GrammarKind.LARK:
                one = {"lark_grammar": spec.text}
        return {"grammars": [one]}


class BoundedCache(Generic[K, V]):
    """Forgets what was not used for longest when it has too many values or they are too large."""

    def __init__(self, max_values: int, max_size: int) -> None:
        self._max_values = max_values
        self._max_size = max_size
        self._size = 0
        self._values: OrderedDict[K, tuple[V, int]] = OrderedDict()

    def __len__(self) -> int:
        """How many values it has."""
        return len(self._values)

    def get(self, key: K) -> V | None:
        """The value, which counts as used."""
        found = self._values.get(key)
        if found is None:
            return None
        self._values.move_to_end(key)
        return found[0]

    def put(self, key: K, value: V, size: int) -> None:
        """Keep a value; one that is larger than everything together may be is not kept."""
        if key in self._values:
            self._size -= self._values.pop(key)[1]
        if size > self._max_size:
            return
        self._values[key] = (value, size)
        self._size += size
        while len(self._values) > self._max_values or self._size > self._max_size:
            self._size -= self._values.popitem(last=False)[1][1]


def _explain(error: str) -> str:
    """What a client is told of an error of llguidance."""
    text = error.replace("<non-verbose/>", "").strip()
    if text.startswith("NoExtension"):
        text = "nothing can match it"
    return f"The grammar cannot be used: {text[:MAX_MESSAGE_CHARS]}"
