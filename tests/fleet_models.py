"""Models of the fakes of ``fleet_harness``, and their engines, whose weights are texts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from typing_extensions import override

from mlx_parallm.config import ModelConfig
from mlx_parallm.engine.kind import BuiltModel, PendingModel
from mlx_parallm.engine.live_weights import LiveWeights
from mlx_parallm.engine.models import KindTraits, ModelMemory, ServedModel
from mlx_parallm.engine.policies import Policies
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.work import StateCache
from tests.version_harness import MAX_RANK, FakeStore

#: Adapters that an engine keeps.
MAX_LOADED = 4


@dataclass(frozen=True, kw_only=True)
class FakeModel(ServedModel):
    names: tuple[str, ...] = ("m",)
    root: str = "m"
    created: int = 0
    traits = KindTraits(name="fake")
    state_cache = StateCache(num_states=4, interval=1024)

    @property
    @override
    def cache_tokens(self) -> int:
        return 4096

    @property
    def memory(self) -> ModelMemory:
        return ModelMemory()


class FakeUsers:
    """Implements ``AdapterUsers``: there is no slot.

    Attributes:
        used: the contents of adapters that requests use.
    """

    def __init__(self) -> None:
        self.used: set[str] = set()
        self.adapters = SimpleNamespace(
            num_slots=8,
            resident=(),
            is_available=lambda content: False,
            pin=lambda contents: None,
            forget=lambda content: True,
        )

    def uses(self, content: str) -> bool:
        return content in self.used

    def num_running(self, content: str) -> int:
        return 0

    def refresh_weights(self) -> None:
        pass


@dataclass
class FakeWeights:
    """In place of ``DeviceWeights``: there is a text for each tensor."""

    tensors: dict[str, str] = field(default_factory=lambda: {"a": "start", "b": "start"})
    prepared: dict[str, str] | None = None
    refuses: bool = False

    def prepare_folder(self, folder: Path) -> None:
        self._prepare({name: str(folder) for name in self.tensors})

    def prepare_tensors(self, tensors: Mapping[str, Any]) -> None:
        self._prepare(self.tensors | dict(tensors))

    def _prepare(self, tensors: dict[str, str]) -> None:
        if self.refuses:
            self.refuses = False
            raise InvalidRequestError("There is no room.", param="weights")
        self.prepared = tensors

    def commit(self) -> None:
        assert self.prepared is not None
        self.tensors, self.prepared = self.prepared, None

    def drop_prepared(self) -> None:
        self.prepared = None


def make_engine(name: str, kept: Policies | None = None) -> SimpleNamespace:
    """Return an engine of a model; ``kept`` are the policies that it had before."""
    weights, users = FakeWeights(), FakeUsers()
    policies = kept or Policies(
        name, cast(Any, users), FakeStore(), max_loaded=MAX_LOADED, max_rank=MAX_RANK
    )
    live = LiveWeights(policies, cast(Any, weights), cast(Any, None))
    return SimpleNamespace(
        live=live,
        policies=policies,
        weights=weights,
        users=users,
        settle=tuple,
        release=lambda: None,
        is_paused=False,
    )


class FakePending(PendingModel):
    """A model that is being loaded, at once."""

    def __init__(self, name: str) -> None:
        self._name = name

    @property
    def num_bytes(self) -> int:
        return 0

    @property
    def name(self) -> str:
        return self._name

    def advance(self) -> float:
        return 1.0

    def finish(self, kept: Policies | None = None) -> BuiltModel:
        model = FakeModel(names=(self._name,))
        return BuiltModel(ModelConfig(), model, cast(Any, make_engine(self._name, kept)))

    def close(self) -> None:
        pass


def begin_pending(name: str, families: Any, worker: Any) -> FakePending:
    """See ``FakePending``; in another process, too."""
    return FakePending(name)
