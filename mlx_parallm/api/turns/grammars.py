"""Compiles what an answer must match, off the event loop."""

from __future__ import annotations

import asyncio

from mlx_parallm.generation.model import GenerationModel
from mlx_parallm.grammar.spec import GrammarSpec
from mlx_parallm.grammar.vocabulary import UNSUPPORTED
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.request import Grammar

# Work is bounded otherwise; this bounds it where the machine is busy or a bound is missing.
COMPILE_TIMEOUT_S = 10.0


async def grammar_of(
    spec: GrammarSpec, model: GenerationModel, *, param: str, begins_after: str | None = None
) -> Grammar:
    """Compile what an answer must match, off the event loop unless it is known.

    Args:
        spec: what to match.
        model: who answers.
        param: the request field it came from, for errors.
        begins_after: see ``Grammar``.

    Raises:
        InvalidRequestError: it is wrong, cannot be enforced, or is too much work.
    """
    compiler = model.grammars
    if compiler is None:
        raise InvalidRequestError(f"{UNSUPPORTED}.", param=param)
    text = compiler.known(spec)
    if text is None:
        future = asyncio.wrap_future(compiler.submit(spec))
        try:
            text = await asyncio.wait_for(future, COMPILE_TIMEOUT_S)
        except InvalidRequestError as refusal:
            refusal.param = param
            raise
        except TimeoutError:
            raise InvalidRequestError(
                f"It took more than {COMPILE_TIMEOUT_S:.0f} s to make a grammar of this.",
                param=param,
            ) from None
    return Grammar(text=text, begins_after=begins_after)


async def beginnings_of(
    grammar: Grammar, model: GenerationModel, starts: tuple[str, ...]
) -> frozenset[str]:
    """Return those of some texts with which what a compiled grammar matches may begin."""
    compiler = model.grammars
    if compiler is None or not starts:
        return frozenset()
    return frozenset(await asyncio.wrap_future(compiler.submit_starts(grammar.text, starts)))
