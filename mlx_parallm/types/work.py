"""Requests to models of any kind, their events and the readers of these, as the core knows them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol, Self

from mlx_parallm.types.content import salt
from mlx_parallm.types.errors import ParallmError


@dataclass(frozen=True, slots=True)
class CacheScope:
    """Which requests may reuse cached results; the scope is part of every cache key.

    The server sets it when a request enters; no field of a request can change it.

    Attributes:
        owner: the only client whose requests may reuse them; None: every client's may.
    """

    owner: str | None = None

    def content_key(self, *parts: str | None) -> bytes:
        """Return a cache key: equal iff the scopes and all parts are equal."""
        return salt(self.owner, *parts)


EVERYBODY = CacheScope()
#: ``LEAST_SHARED``: tokens that two prompts without turns must share, behind the last state, for
#: which a state is kept where they part. To keep it takes a step of its own.
LEAST_SHARED = 512


class Ends(IntEnum):
    """The end that an event is: of nothing, of a sample, or of its request."""

    NOTHING = 0
    SAMPLE = 1
    REQUEST = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class StateCache:
    """The states after prefixes that an engine keeps for a model; without one none is found.

    Attributes:
        num_states: the most that it keeps.
        interval: tokens between them within a prompt; it also keeps those at the end of the prompt
            and at ``RequestWork.turn_start``, or where it parts from an earlier one.
        needs_blocks: False if the state is all that the model keeps of a prefix.
    """

    num_states: int
    interval: int
    needs_blocks: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestWork:
    """The size of a request, and what it may share with earlier ones.

    Attributes:
        num_tokens: tokens that are read before anything is answered.
        num_samples: samples that are answered side by side.
        max_output: most tokens of a sample; 0 if nothing is generated, None if it is not bounded.
        prefix: the tokens whose computation is kept for requests that begin with them; empty if
            none is kept.
        num_whole: tokens of ``prefix`` at its begin that are of use together only: a source.
        turn_start: tokens of ``prefix`` with which the next request probably begins too; None if
            unknown.
        answer_start: likewise, if that adds the answer and a further turn.
        model: the first name of the model; empty if it keeps no states after prefixes.
        inputs: the tokens of each input whose result is kept for equal inputs; empty if none is.
        cache_key: requests with different keys share nothing.
        rank: the number of the engine that the client chose; None if it chose none.
        sticky: names what one engine keeps for later requests, such as a training session or the
            recurrent state of a policy. Requests of this name go to that engine, whatever else they
            ask. If it dies, the next request is placed as the first one was, or refused: see
            ``lost``. None if nothing is kept.
        lost: the refusal of a request that goes on with what ``sticky`` names, if the engine that
            kept it has died; None if any engine can begin it.
        client: whose it is; engines take turns between clients.
        line: an engine begins requests of one line in the order in which they came; None if their
            order is not known.
        is_divisible: True if several engines may answer some of the samples each; of a request with
            one sample, some of the inputs.
    """

    num_tokens: int
    num_samples: int = 1
    max_output: int | None = 0
    prefix: Sequence[int] = ()
    num_whole: int = 0
    turn_start: int | None = None
    answer_start: int | None = None
    model: str = ""
    inputs: Sequence[tuple[int, ...]] = ()
    cache_key: Hashable = ()
    rank: int | None = None
    sticky: Hashable | None = None
    lost: ParallmError | None = None
    client: str = ""
    line: Hashable | None = None
    is_divisible: bool = False


class Request(Protocol):
    """A request to one model."""

    @property
    def request_id(self) -> str:
        """Unique among the requests in flight."""
        ...

    @property
    def model(self) -> str:
        """The model's first name."""
        ...

    @property
    def adapter(self) -> str | None:
        """The name of an adapter of the model; None for the model itself."""
        ...

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens that a model reads, as a log counts them."""
        ...

    def work(self) -> RequestWork:
        """Return what the request asks of an engine."""
        ...

    def entering(self, scope: CacheScope, rank: int | None, *, is_background: bool) -> Self:
        """Return the request as it enters a server.

        Args:
            scope: whose requests may reuse its results.
            rank: the number of the engine that the client chose; None if it chose none.
            is_background: True if it is to wait behind all others.
        """
        ...


class Event(Protocol):
    """Something that happened to a request."""

    @property
    def request_id(self) -> str:
        """The request."""
        ...

    @property
    def num_tokens(self) -> int:
        """Return the number of generated tokens in it."""
        ...

    @property
    def ends(self) -> Ends:
        """Return whether a sample or the request ends with it."""
        ...


class EventReader(Protocol):
    """Takes the events of one request."""

    @property
    def num_samples(self) -> int:
        """Places in the model's queue that the request takes."""
        ...

    @property
    def has_one_event(self) -> bool:
        """True if the request ends with its first event, and nothing is done before that."""
        ...

    @property
    def is_complete(self) -> bool:
        """True once the last event was put."""
        ...

    @property
    def is_overfull(self) -> bool:
        """True if its reader is so far behind that the request should end."""
        ...

    def put(self, event: Any, /) -> None:
        """Take an event; those after the last are dropped."""
        ...

    def fail(self, error: ParallmError, /) -> None:
        """End with an error; events that were not read are dropped."""
        ...
