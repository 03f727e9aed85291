"""The seam between a session and what makes its steps, of which there is a kind per estimator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from mlx_parallm.adapters.weights import AdapterWeights
from mlx_parallm.training.records import Example, SessionConfig, SessionState, StepRecord
from mlx_parallm.training.requests import TrainingOp
from mlx_parallm.training.session_files import SessionFiles
from mlx_parallm.training.settings import StepChanges
from mlx_parallm.training.step_forwards import MadeStep
from mlx_parallm.types.gradients import TrainingArrays
from mlx_parallm.types.training import TrainableInfo
from mlx_parallm.worker.training_ops import OpenTraining


class StepHost(Protocol):
    """The session as the maker of its steps sees it."""

    @property
    def config(self) -> SessionConfig:
        """Return its settings."""
        ...

    @property
    def files(self) -> SessionFiles:
        """Return what is on disk."""
        ...

    @property
    def state(self) -> SessionState:
        """Return its state, as it was saved last."""
        ...

    @property
    def info(self) -> TrainableInfo | None:
        """Return facts about its adapter; None if the engine's part is not open."""
        ...

    @property
    def examples(self) -> list[Example]:
        """Return all of its examples, which a loss may add references to."""
        ...

    @property
    def validation(self) -> list[Example]:
        """Return the examples that steps are judged by; empty: they are not."""
        ...

    def save(self, **changes: Any) -> None:
        """Change the state; raise StorageError if it cannot be saved."""
        ...

    @property
    def num_steps(self) -> int:
        """Return the number of steps made."""
        ...

    async def opened(self) -> TrainableInfo:
        """Have the engine's part made, if it is not there; see ``Session.open``."""
        ...

    def batch_of(self, number: int) -> list[Example]:
        """Return the examples of a step, by its number from 0."""
        ...

    def in_form(self, examples: Sequence[Example]) -> list[Example]:
        """Return examples as forwards compute them; the engine's part is open."""
        ...

    async def ask(self, *ops: TrainingOp) -> tuple[Any, ...]:
        """Return the results of ops; open the session anew, and try again, if it was lost."""
        ...

    async def send(self, *ops: TrainingOp) -> tuple[Any, ...]:
        """Return the results of ops; raise SessionLostError if the session was lost."""
        ...

    async def beside(self, state: TrainingArrays | None, *ops: TrainingOp) -> tuple[Any, ...]:
        """Return the results of ops about the session with other parameters.

        ``state``: the parameters; None: those of the beginning.
        """
        ...

    def forget(self) -> None:
        """Open the engine's part anew before its next op."""
        ...

    def note(self, record: StepRecord, logged: bytes = b"") -> None:
        """Write a step down; raise StorageError, and count nothing, if the disk refuses it."""
        ...


class Estimation(Protocol):
    """Makes the steps of a session. Its methods run one after the other."""

    async def opening(self, op: OpenTraining) -> tuple[TrainingOp, ...]:
        """Return ops that open the session with what its files know, of which one is first."""
        ...

    async def restore(self) -> None:
        """Bring an engine's part that was just opened to the last step."""
        ...

    @property
    def unapplied(self) -> tuple[TrainingOp, ...]:
        """Return ops that bring an open engine's part to the last step."""
        ...

    def note_applied(self) -> None:
        """Forget those ops, which were run."""
        ...

    async def prepared(self, examples: Sequence[Example]) -> list[Example]:
        """Return examples with all that their loss is computed from."""
        ...

    async def step(self, examples: Sequence[Example] | None, changes: StepChanges) -> MadeStep:
        """Make a step on these examples, or on the next batch, and note it."""
        ...

    async def keep(self) -> None:
        """Have what was learnt on disk, so that no step needs to be made again."""
        ...

    async def weights(self, step: int | None, *, of_checkpoint: bool) -> AdapterWeights:
        """Return the adapter; see ``Session.weights``."""
        ...
