"""Grammars are compiled where they are matched: in the engines' process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from operator import methodcaller
from typing import Any

from mlx_parallm.engine.state import EngineState
from mlx_parallm.grammar.compiler import MAX_CACHED, MAX_CACHED_CHARS, BoundedCache
from mlx_parallm.grammar.spec import GrammarSpec
from mlx_parallm.grammar.vocabulary import GrammarVocabulary

Ask = Callable[[Callable[[EngineState], Any]], "Future[Any]"]


class RemoteGrammars:
    """Implements ``engine.interface.Grammars``."""

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
        future = self._ask(methodcaller("compile_grammar", self._model, spec))
        future.add_done_callback(lambda done: self._keep(spec, done))
        return future

    def compile(self, spec: GrammarSpec) -> str:
        """See ``Grammars.compile``."""
        return self.known(spec) or self.submit(spec).result()

    def _keep(self, spec: GrammarSpec, done: Future[str]) -> None:
        if done.cancelled() or done.exception() is not None:
            return
        with self._lock:
            self._texts.put(spec, done.result(), len(spec.text))
