"""Grammars are compiled where they are matched: in the engines' process."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from functools import partial
from typing import Any, cast

from mlx_parallm.engine.models import Ask, EngineState
from mlx_parallm.grammar.compiler import MAX_CACHED, MAX_CACHED_CHARS, BoundedCache
from mlx_parallm.grammar.spec import GrammarSpec
from mlx_parallm.grammar.vocabulary import GrammarVocabulary


def compile_grammar(state: EngineState, model: str, spec: GrammarSpec) -> Future[str]:
    """Compile a grammar for a model's tokens, in the engines' process; see ``Grammars.submit``."""
    return cast("Any", state.engines[model]).grammars.submit(spec)


def grammar_starts(
    state: EngineState, model: str, text: str, beginnings: tuple[str, ...]
) -> Future[tuple[str, ...]]:
    """Ask a model's grammars in the engines' process; see ``Grammars.submit_starts``."""
    return cast("Any", state.engines[model]).grammars.submit_starts(text, beginnings)


class RemoteGrammars:
    """Implements ``generation.model.Grammars``."""

    def __init__(self, model: str, vocabulary: GrammarVocabulary, ask: Ask) -> None:
        """``model`` is a first name; ``ask`` queries the engines' state."""
        self.vocabulary = vocabulary
        self._model = model
        self._ask = ask
        self._lock = threading.Lock()
        self._texts = BoundedCache[GrammarSpec, str](MAX_CACHED, MAX_CACHED_CHARS)

    def known(self, spec: GrammarSpec) -> str | None:
        """See ``Grammars.known``."""
        with self._lock:
            return self._texts.get(spec)

    def submit(self, spec: GrammarSpec) -> Future[str]:
        """See ``Grammars.submit``."""
        question = partial(compile_grammar, model=self._model, spec=spec)
        # An engine keeps what it has compiled lately.
        future = self._ask(question, key=(self._model, spec))
        future.add_done_callback(lambda done: self._keep(spec, done))
        return future

    def submit_starts(self, text: str, beginnings: tuple[str, ...]) -> Future[tuple[str, ...]]:
        """See ``Grammars.submit_starts``."""
        question = partial(grammar_starts, model=self._model, text=text, beginnings=beginnings)
        return self._ask(question, key=(self._model, text))

    def compile(self, spec: GrammarSpec) -> str:
        """See ``Grammars.compile``."""
        return self.known(spec) or self.submit(spec).result()

    def _keep(self, spec: GrammarSpec, done: Future[str]) -> None:
        if done.cancelled() or done.exception() is not None:
            return
        with self._lock:
            self._texts.put(spec, done.result(), len(spec.text))
