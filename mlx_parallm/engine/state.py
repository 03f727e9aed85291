"""What can be told of the engines at any time: nothing here waits for a step."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field

from prometheus_client import generate_latest

from mlx_parallm.engine.encoders.engine import EncodeEngine
from mlx_parallm.engine.engine import Engine
from mlx_parallm.engine.interface import Grammars
from mlx_parallm.engine.metrics import MetricFamilies, total
from mlx_parallm.grammar.spec import GrammarSpec
from mlx_parallm.types.errors import OverloadedError


@dataclass(frozen=True, slots=True)
class SlotCounts:
    """The adapters that may be in one batch of a model.

    Attributes:
        num_slots: how many.
        num_resident: slots with an adapter in them.
        num_used: adapters that running sequences use.
    """

    num_slots: int
    num_resident: int
    num_used: int


@dataclass(frozen=True, slots=True)
class MetricsText:
    """The engines' metrics.

    Attributes:
        text: in Prometheus' format.
        slots: by models' first names.
    """

    text: bytes = b""
    slots: Mapping[str, SlotCounts] = field(default_factory=dict)


class EngineState:
    """Answers about the engines. Safe from any thread."""

    def __init__(
        self,
        families: MetricFamilies,
        engines: Mapping[str, Engine],
        encoders: Mapping[str, EncodeEngine],
        grammars: Mapping[str, Grammars],
    ) -> None:
        """All by models' first names; encoders come and go."""
        self._families = families
        self._grammars = grammars
        self._engines = engines
        self._encoders = encoders

    def check_room(self, model: str, client: str, n: int) -> None:
        """Raise OverloadedError if a model's queue has no room; unknown models have."""
        engine = self._engines.get(model)
        if engine is None:
            return
        try:
            engine.check_room(client, n)
        except OverloadedError:
            engine.on_reject()
            raise

    def num_running_and_waiting(self) -> tuple[int, int]:
        """Sequences of the latest step, over all models."""
        return total(self._families.running), total(self._families.waiting)

    def cache_bytes(self) -> Mapping[str, int]:
        """Of the results that loaded encoders keep, by their first names."""
        return {name: one.cache_bytes for name, one in dict(self._encoders).items()}

    def compile_grammar(self, model: str, spec: GrammarSpec) -> Future[str]:
        """The text of a grammar of a model's tokens; see ``Grammars.submit``."""
        return self._grammars[model].submit(spec)

    def metrics(self) -> MetricsText:
        """The engines' metrics."""
        slots = {name: one.policies.users.adapters for name, one in self._engines.items()}
        counts = {
            name: SlotCounts(one.num_slots, len(one.resident), one.num_used)
            for name, one in slots.items()
        }
        return MetricsText(generate_latest(self._families.registry), counts)
