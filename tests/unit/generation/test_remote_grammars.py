"""Grammars answer the same questions here and in the engines' process."""

from __future__ import annotations

import pytest

from mlx_parallm.generation.model import Grammars
from mlx_parallm.generation.remote_grammars import RemoteGrammars
from mlx_parallm.grammar.compiler import GrammarCompiler

QUESTIONS = {name for name, value in vars(Grammars).items() if callable(value) and name[0] != "_"}


@pytest.mark.parametrize("implementation", [GrammarCompiler, RemoteGrammars])
def test_every_question_has_an_answer(implementation: type) -> None:
    assert {"known", "submit", "compile", "submit_starts"} <= QUESTIONS
    assert {name for name in QUESTIONS if not hasattr(implementation, name)} == set()
