"""Rows that are made of a scheduled sequence keep all that belongs to the sequence.

A new field of ``ScheduledSequence`` fails these tests until it is on the lists below: whether it
belongs to the sequence or to the tokens of a step, whether followers get it, and which of the
steps that a model runs for itself set it.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest

import mlx_parallm
from mlx_parallm.distributed.codec import STAND_IN, StepDecoder, StepEncoder, for_follower
from mlx_parallm.types.model_input import InputRows, Span
from mlx_parallm.types.request import DEFAULT_VERSION, SamplingParams
from mlx_parallm.types.step import (
    DraftInput,
    SampleSpec,
    ScheduledBatch,
    ScheduledSequence,
    SourceTable,
)
from mlx_parallm.worker.attention.reference import ReferenceAttention
from mlx_parallm.worker.generation.draft_model import drafted, known_tokens
from mlx_parallm.worker.generation.load.image_check import ImageText
from mlx_parallm.worker.generation.row_groups import make_groups
from mlx_parallm.worker.generation.step_rows import single_rows, spread_proposals
from mlx_parallm.worker.generation.warm_up import on_block

SPEC = SampleSpec(
    params=SamplingParams(temperature=0.5), seed=3, position=7, prompt_ids=(1,), output_ids=[5]
)
INPUT = InputRows(slot=2, first_row=5, num_rows=2, offset=1)
#: VALUES of every field, none of which is its default.
VALUES: dict[str, Any] = {
    "seq_id": 11,
    "slot": 3,
    "start": 9,
    "token_ids": (21, 22, 23, 24),
    "block_table": (4, 2, 7, 5),
    "adapter_slot": 6,
    "version": "v8",
    "sample": SPEC,
    "verify": (replace(SPEC, position=8), replace(SPEC, position=9)),
    "kept_slots": (12, 13),
    "draft": DraftInput(start=7, token_ids=(31, 32, 33)),
    "prompt_logprobs": 2,
    "target_ids": (41, 42),
    "target_start": 1,
    "prompt_entropy": True,
    "values": True,
    "inputs": (INPUT,),
    "rope_offsets": ((0, 50), (2, 60)),
    "source": SourceTable(block_table=(8, 1), num_tokens=21),
}
#: OF_SEQUENCE: what stays the same whichever tokens a step runs.
OF_SEQUENCE = {"seq_id", "slot", "block_table", "adapter_slot", "version", "source"}
#: Fields of the tokens that a row is made of.
OF_TOKENS = {"start", "token_ids", "inputs", "rope_offsets"}
#: Fields of how the tokens after a row are chosen or scored, which rows that only compute lack.
OF_CHOICE = {
    "sample",
    "verify",
    "kept_slots",
    "draft",
    "prompt_logprobs",
    "target_ids",
    "target_start",
    "prompt_entropy",
    "values",
}
#: Fields that ranks besides the first get as they are, and those that they get otherwise.
SENT = (OF_SEQUENCE | OF_TOKENS | {"target_start", "kept_slots"}) - {"version"}
NOT_SENT = {
    "version": DEFAULT_VERSION,
    "sample": STAND_IN,
    "verify": (STAND_IN, STAND_IN),
    "draft": None,
    "prompt_logprobs": None,
    "target_ids": (0, 0),
    "prompt_entropy": False,
    "values": False,
}
FILLED = ScheduledSequence(**VALUES)
NAMES = {field.name for field in fields(FILLED)}
#: Fields of any row of tokens.
TOKENS = {"seq_id", "slot", "start", "token_ids", "block_table"}
#: FROM_NOTHING: where rows are made from nothing: the fields that are set, and those that are not
#: because the row has no adapter, is no part of a request, or gets them later.
FROM_NOTHING: dict[str, tuple[set[str], set[str]]] = {
    "generation/scheduler/batch_rows.py": (OF_SEQUENCE | OF_TOKENS | OF_CHOICE, set()),
    "distributed/codec.py": (
        TOKENS | {"adapter_slot", "sample"},
        # The rare ones follow; see ``_read_rare``.
        {"inputs", "rope_offsets", "source", "verify", "kept_slots", "target_ids", "target_start"}
        | {"version", "draft", "prompt_logprobs", "prompt_entropy", "values"},
    ),
    "worker/generation/warm_up.py": (
        TOKENS | {"sample"},
        {"adapter_slot", "version", "source", "inputs", "rope_offsets"} | OF_CHOICE - {"sample"},
    ),
    "worker/generation/load/self_check.py": (
        TOKENS,
        {"adapter_slot", "version", "source", "inputs", "rope_offsets"} | OF_CHOICE,
    ),
    "worker/generation/source_rows.py": (
        TOKENS,
        {"adapter_slot", "version", "source", "inputs", "rope_offsets"} | OF_CHOICE,
    ),
    "worker/generation/load/image_check.py": (
        # ``with_rows`` adds inputs and offsets.
        TOKENS,
        {"adapter_slot", "version", "source", "inputs", "rope_offsets"} | OF_CHOICE,
    ),
    "worker/attention/check.py": (
        TOKENS,
        {"adapter_slot", "version", "source", "inputs", "rope_offsets"} | OF_CHOICE,
    ),
    "worker/layers/attention_heads.py": (
        TOKENS,
        {"adapter_slot", "version", "source", "inputs", "rope_offsets"} | OF_CHOICE,
    ),
    "worker/timing/tunings.py": (
        TOKENS,
        {"adapter_slot", "version", "source", "inputs", "rope_offsets"} | OF_CHOICE,
    ),
}


def values_of(row: ScheduledSequence, names: set[str]) -> dict[str, Any]:
    return {name: getattr(row, name) for name in names}


def test_every_field_is_on_the_lists() -> None:
    assert VALUES.keys() == NAMES
    for field in fields(FILLED):
        assert field.default is MISSING or VALUES[field.name] != field.default, field.name
    lists = (OF_SEQUENCE, OF_TOKENS, OF_CHOICE)
    assert set.union(*lists) == NAMES
    assert sum(map(len, lists)) == len(NAMES)
    assert SENT | NOT_SENT.keys() == NAMES
    assert not SENT & NOT_SENT.keys()


@dataclass(frozen=True)
class Rebuilt:
    """Rows that a place makes of ``FILLED``, and the values of the fields that it changes."""

    rows: Callable[[], list[ScheduledSequence]]
    changed: list[dict[str, Any]]


#: Values of rows that are not sampled, scored or drafted.
COMPUTED: dict[str, Any] = {
    "sample": None,
    "verify": (),
    "kept_slots": (),
    "draft": None,
    "prompt_logprobs": None,
    "target_ids": (),
    "target_start": 0,
    "prompt_entropy": False,
    "values": False,
}
SINGLE = [
    {
        "start": 9 + index,
        "token_ids": (21 + index,),
        "inputs": inputs,
        "rope_offsets": ((0, offset),),
        **COMPUTED,
    }
    for index, (inputs, offset) in enumerate(
        [
            ((), 50),
            ((InputRows(slot=2, first_row=5, num_rows=1, offset=0),), 50),
            ((InputRows(slot=2, first_row=6, num_rows=1, offset=0),), 60),
            ((), 60),
        ]
    )
]
#: The draft model has no adapters, and takes tokens only, at their places.
DRAFTED = {"adapter_slot": 0, "inputs": (), "rope_offsets": (), **COMPUTED}


def with_image() -> list[ScheduledSequence]:
    text = ImageText(token_ids=[0] * 20, spans=(Span(10, 12),), first_slot=8, has_axes=False)
    return [text.with_rows(FILLED)]


def grouped(*, batch_decode: bool) -> list[ScheduledSequence]:
    rows = [FILLED, *single_rows(FILLED)]
    groups = make_groups(rows, ReferenceAttention(4), 4, batch_decode=batch_decode)
    assert [row for group in groups for row in group.slots] == [VALUES["slot"]] * len(rows)
    assert all(group.adapter_rows is not None for group in groups)
    return [row for group in groups for row in group.sequences if len(row.token_ids) > 1]


PLACES = {
    "single rows": Rebuilt(lambda: single_rows(FILLED), SINGLE),
    "spread proposals": Rebuilt(lambda: list(spread_proposals([FILLED])), SINGLE),
    "known tokens of a draft model": Rebuilt(
        lambda: [known_tokens(FILLED)], [{"start": 7, "token_ids": (31, 32, 33), **DRAFTED}]
    ),
    "a draft model's rows": Rebuilt(
        lambda: [drafted(FILLED, 12, (-1,))], [{"start": 12, "token_ids": (-1,), **DRAFTED}]
    ),
    "warm-up": Rebuilt(
        lambda: list(on_block(ScheduledBatch(step_id=0, sequences=(FILLED,)), 1).sequences),
        [
            {
                "block_table": (1, 1, 1, 1),
                "source": SourceTable(block_table=(1, 1), num_tokens=21),
            }
        ],
    ),
    "image check": Rebuilt(
        with_image,
        [
            {
                "inputs": (InputRows(slot=8, first_row=0, num_rows=2, offset=1),),
                "rope_offsets": (),
            }
        ],
    ),
    "groups": Rebuilt(lambda: grouped(batch_decode=True), [{}]),
    "groups of one row": Rebuilt(lambda: grouped(batch_decode=False), [{}]),
}


@pytest.mark.parametrize("place", PLACES)
def test_what_is_not_changed_on_purpose_stays(place: str) -> None:
    rebuilt = PLACES[place]
    for row, changed in zip(rebuilt.rows(), rebuilt.changed, strict=True):
        assert values_of(row, NAMES) == VALUES | changed


def test_followers_get_all_but_what_is_named() -> None:
    row = replace(FILLED, draft=None)
    batch = ScheduledBatch(step_id=5, sequences=(row,), adapters={6: "digest"})
    followed = for_follower(batch)
    assert StepDecoder().decode(StepEncoder().encode(batch)) == followed
    [received] = followed.sequences
    assert values_of(received, SENT) == values_of(FILLED, SENT)
    assert values_of(received, set(NOT_SENT)) == NOT_SENT


def made_from_nothing() -> dict[str, set[str]]:
    """Return the fields that each file of the package names where it makes rows."""
    package = Path(mlx_parallm.__file__).parent
    made: dict[str, set[str]] = {}
    for path in package.rglob("*.py"):
        text = path.read_text()
        if "ScheduledSequence(" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "ScheduledSequence":
                assert not node.args
                names = {keyword.arg or "**" for keyword in node.keywords}
                made.setdefault(path.relative_to(package).as_posix(), set()).update(names)
    return made


def test_rows_are_made_from_nothing_where_that_is_known() -> None:
    made = made_from_nothing()
    assert made == {place: named for place, (named, _) in FROM_NOTHING.items()}
    for place, (named, left) in FROM_NOTHING.items():
        assert named | left == NAMES, place
        assert not named & left, place
