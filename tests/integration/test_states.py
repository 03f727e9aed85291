"""States of recurrent and convolution layers: which models have one, and that it is all."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, make_prompt_cache

from benchmarks.architectures import names
from benchmarks.states import NUM_TOKENS, leaf_caches, listed, section, states_of, with_section
from tests.builders.architectures.configs import VOCAB_SIZE, config_of
from tests.builders.architectures.trial import build

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
PROMPT = tuple(7 * index % VOCAB_SIZE for index in range(40))
OTHER = tuple(11 * index % VOCAB_SIZE for index in range(29))


#: STATEFUL architectures, as the page lists them.
STATEFUL = listed(PAGE.read_text())


def prefilled(model: Any, tokens: Sequence[int]) -> list[Any]:
    """Return a model's own caches after these tokens."""
    caches = make_prompt_cache(model)
    mx.eval(model(mx.array([tokens]), cache=caches), [cache.state for cache in caches])
    return caches


def shapes_of(caches: list[Any]) -> list[list[tuple[Any, ...]]]:
    return [[(array.shape, array.dtype) for array in arrays] for arrays in states_of(caches)]


def copied(model: Any, caches: list[Any]) -> list[Any]:
    """Return caches with copies of the arrays of states, and of KV, and with nothing else."""
    copies = make_prompt_cache(model)
    arrays = iter(states_of(caches))
    for target, source in zip(leaf_caches(copies), leaf_caches(caches), strict=True):
        if isinstance(source, ArraysCache):
            target.cache = [mx.array(array) for array in next(arrays)]
        else:
            vars(target).update(deepcopy(vars(source)))
    return copies


def continued(model: Any, caches: list[Any]) -> list[mx.array]:
    """Return the logits of a chunk and of decode steps behind what caches have."""
    return [model(mx.array([part]), cache=caches) for part in ((5, 6, 7), (8,), (9,))]


def test_the_page_lists_what_loads() -> None:
    written = PAGE.read_text()
    assert with_section(written, section(names())) == written, (
        "run `python -m benchmarks.architectures --states`"
    )


def test_what_can_keep_a_state_does_so_in_its_tiny_configuration() -> None:
    """Check it: with attention alone, the tests of an architecture would not reach its state."""
    for name in names():
        try:
            module = importlib.import_module(f"mlx_lm.models.{name}")
        except (ImportError, SystemExit):
            continue
        assert not hasattr(module, "ArraysCache") or name in STATEFUL, name


@pytest.mark.parametrize("name", STATEFUL)
def test_states_have_one_size(name: str) -> None:
    model = build(config_of(name))
    sizes = [shapes_of(prefilled(model, PROMPT[:count])) for count in (NUM_TOKENS, 17, 40)]
    caches = prefilled(model, PROMPT[:16])
    for token in PROMPT[16:18]:
        mx.eval(model(mx.array([[token]]), cache=caches))
    sizes.append(shapes_of(caches))
    assert all(size == sizes[0] for size in sizes)


@pytest.mark.parametrize("name", STATEFUL)
def test_a_copied_state_is_all_that_its_sequence_needs(name: str) -> None:
    """Positions or deltas that a module kept for itself would be those of the last sequence."""
    model, twin = build(config_of(name)), build(config_of(name))
    caches = prefilled(model, PROMPT[:17])
    first, second, third = (copied(model, caches) for _ in range(3))
    wanted = continued(model, first)
    prefilled(model, OTHER)
    assert equal(continued(model, second), wanted)
    assert equal(continued(model, caches), wanted)
    # Another model of the same weights has never seen the prefix.
    prefilled(twin, OTHER)
    assert equal(continued(twin, third), wanted)


def equal(actual: list[mx.array], wanted: list[mx.array]) -> bool:
    return all(mx.array_equal(*pair).item() for pair in zip(actual, wanted, strict=True))
