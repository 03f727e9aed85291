"""Requests to small nets and policies, and what they are answered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from mlx_parallm.types.errors import ConflictError
from mlx_parallm.types.work import CacheScope, Ends, RequestWork

if TYPE_CHECKING:
    import numpy as np

#: ``Arrays``: arrays of all rows, by name.
Arrays = Mapping[str, "np.ndarray"]
#: ``SEQUENCE_PARAM``: the field of a request that names a sequence.
SEQUENCE_PARAM = "sequence_id"
#: ``INPUTS``, ``OBSERVATIONS``, ``STATES``: the fields of requests with arrays by name; a policy's
#: inputs are observations.
INPUTS, OBSERVATIONS, STATES = "inputs", "observations", "hidden_states"
#: ``ANY``: a size in a ``TensorSpec`` that each request chooses.
ANY = -1


class Distribution(StrEnum):
    """The ways from a policy's outputs to an action."""

    CATEGORICAL = "categorical"
    MULTI_CATEGORICAL = "multi_categorical"
    BERNOULLI = "bernoulli"
    GAUSSIAN = "gaussian"
    SQUASHED_GAUSSIAN = "squashed_gaussian"
    DETERMINISTIC = "deterministic"


@dataclass(frozen=True, slots=True)
class Choices:
    """Elements of a row, counted in its order, that must be whole numbers from 0 to below a count.

    Attributes:
        begin: the first element.
        end: the element after the last one.
        count: the number of choices.
    """

    begin: int
    end: int
    count: int


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A named tensor of a net.

    Attributes:
        name: by which requests and answers know it.
        dtype: NumPy's name, or "bfloat16", whose numbers are float32 in NumPy's arrays.
        shape: the rows, which are ``ANY``; then time, which is ``ANY`` too, if the tensor has it;
            then sizes.
        choices: elements of a row, at each time, that may not be any numbers, in their order.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    choices: tuple[Choices, ...] = ()

    @property
    def has_time(self) -> bool:
        """True if its second dimension is time."""
        return len(self.shape) > 1 and self.shape[1] == ANY


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySpec:
    """The outputs of a net that make it a policy, by their roles.

    Attributes:
        distribution: of the actions.
        parameters: the output with logits, or with the mean (of a deterministic policy its action).
        log_std: the output with logarithms of the standard deviation, for Gaussians.
        value: the output with the estimate of the value ``[rows, 1]`` or ``[rows]``; None without.
        low: the least action of an environment, by element; None without bounds.
        high: the greatest.
        sizes: the numbers of choices of a multi-categorical action, which share the logits.
    """

    distribution: Distribution
    parameters: str
    log_std: str | None = None
    value: str | None = None
    low: tuple[float, ...] | None = None
    high: tuple[float, ...] | None = None
    sizes: tuple[int, ...] = ()

    @property
    def has_choices(self) -> bool:
        """True if a mask may forbid some of its actions."""
        return self.distribution in {Distribution.CATEGORICAL, Distribution.MULTI_CATEGORICAL}

    @property
    def results(self) -> frozenset[ActResult]:
        """The results that acts have; a squashed Gaussian's entropy has no formula."""
        lacking = {
            Distribution.SQUASHED_GAUSSIAN: {ActResult.ENTROPY},
            Distribution.DETERMINISTIC: {ActResult.ENTROPY, ActResult.LOG_PROBS},
        }
        values = {ActResult.VALUES} if self.value is None else set[ActResult]()
        return frozenset(ActResult) - lacking.get(self.distribution, set()) - values


@dataclass(frozen=True, slots=True, kw_only=True)
class NetSignature:
    """The tensors that a net reads and returns.

    Attributes:
        inputs: what each request brings.
        outputs: what a forward returns.
        states: what recurrent layers hand on from one time to the next, ``[rows, ...]``; their
            zeros begin an episode.
        policy: roles of outputs; None for a net that does not act.
        allows_non_finite: True if inputs may have NaN and infinite numbers.
        tile_rows: rows that are computed at once, so that a row's bits do not depend on the others;
            None if they may, by 1e-6 at most.
        device: "cpu" or "gpu", where it is computed; None before it is loaded.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    states: tuple[TensorSpec, ...] = ()
    policy: PolicySpec | None = None
    allows_non_finite: bool = False
    tile_rows: int | None = None
    device: str | None = None

    @property
    def timed_input(self) -> TensorSpec | None:
        """The first input with a dimension of time; None if none has one."""
        return next((spec for spec in self.inputs if spec.has_time), None)

    @property
    def has_time(self) -> bool:
        """True if inputs have a dimension of time."""
        return self.timed_input is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceUse:
    """A request's use of state that the engine keeps.

    Attributes:
        owner: the client, whose sequences no other sees.
        sequence_id: the client's name of the sequence.
        is_start: True to begin with zeros, whatever was kept.
        is_end: True if the state is not needed any more.
    """

    owner: str
    sequence_id: str
    is_start: bool = False
    is_end: bool = False


def lost_sequence(use: SequenceUse) -> ConflictError:
    """Return the refusal of a request whose sequence ended with its engine."""
    return ConflictError(
        f"The engine that kept the sequence {use.sequence_id!r} stopped, and its state is lost; "
        "start it again.",
        param=SEQUENCE_PARAM,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ActParams:
    """The choice of a request's actions.

    Attributes:
        is_deterministic: True for the likeliest action (a Gaussian's mean).
        seed: of the draws; row i of a request draws by (seed, i).
        action_mask: bool ``[rows, choices]`` (``[rows, time, choices]``); False forbids a choice.
        actions: actions to judge instead of drawing any, like those of an answer.
    """

    is_deterministic: bool = False
    seed: int = 0
    action_mask: np.ndarray | None = None
    actions: np.ndarray | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NetRequest:
    """Rows for one net.

    Attributes:
        request_id: unique among those in flight.
        model: the model's first name.
        inputs: by name, as the signature says, with ``num_rows`` rows.
        num_rows: at least one.
        states: the state before the first time, by name; None for zeros.
        sequence: the state that the engine keeps instead; None without.
        episode_start: bool ``[rows]`` or ``[rows, time]``: where the state is zeros again.
        act: how actions are chosen; None for outputs alone.
        adapter: None: nets have none.
        rank: the number of the engine that the client chose; None if it chose none.
    """

    request_id: str
    model: str
    inputs: Arrays
    num_rows: int
    states: Arrays | None = None
    sequence: SequenceUse | None = None
    episode_start: np.ndarray | None = None
    act: ActParams | None = None
    adapter: str | None = None

    rank: int | None = None

    @property
    def num_prompt_tokens(self) -> int:
        """See ``Request``: rows, since nets read no tokens."""
        return self.num_rows

    def entering(self, scope: CacheScope, rank: int | None, *, is_background: bool) -> NetRequest:
        """Return the request as it enters a server; see ``Request``. Nothing of it is reused."""
        del scope, is_background
        return self if rank == self.rank else replace(self, rank=rank)

    def work(self) -> RequestWork:
        """Return what the request asks of an engine: that of its sequence, if it has one."""
        use = self.sequence
        if use is None:
            return RequestWork(num_tokens=self.num_rows, rank=self.rank)
        return RequestWork(
            num_tokens=self.num_rows,
            rank=self.rank,
            sticky=("net", self.model, use.owner, use.sequence_id),
            lost=None if use.is_start else lost_sequence(use),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class NetResults:
    """An answer, with as many rows as the request.

    Attributes:
        outputs: the net's outputs by name; for acts ``ActResult``'s names instead.
        states: the state after the last time, by name.
        version: the label of the weights that computed it.
        has_other_weights: True if other weights made some of the kept state.
    """

    outputs: Arrays
    states: Arrays = field(default_factory=dict[str, "np.ndarray"])
    version: str = ""
    has_other_weights: bool = False

    @property
    def num_numbers(self) -> int:
        """The numbers of all outputs."""
        return sum(array.size for array in self.outputs.values())


class ActResult(StrEnum):
    """Names of an act's outputs.

    ``LOG_PROBS`` are those of ``ACTIONS``, before these are clipped or scaled for an environment.
    ``DIST`` is followed by a dot and the role of a distribution's parameter.
    """

    ACTIONS = "actions"
    ACTIONS_FOR_ENV = "actions_for_env"
    LOG_PROBS = "log_probs"
    VALUES = "values"
    ENTROPY = "entropy"
    DIST = "dist"


@dataclass(frozen=True, slots=True, kw_only=True)
class NetEvent:
    """The only event of a request that did not fail."""

    request_id: str
    results: NetResults

    @property
    def num_tokens(self) -> int:
        """Return the number of generated tokens in it: none."""
        return 0

    @property
    def ends(self) -> Ends:
        """Return what ends with it."""
        return Ends.REQUEST
