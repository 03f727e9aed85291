"""The engines of ``LLM``, on the caller's thread or in processes of their own."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator, Sequence
from typing import Any, Protocol, TypeVar

from mlx_parallm.engine.policies import AdapterInfo, AdapterUpload
from mlx_parallm.generation.model import GenerationModel
from mlx_parallm.pooling.model import PoolingModel
from mlx_parallm.serving.interface import PoolingCalls
from mlx_parallm.training.service import Train
from mlx_parallm.types.events import GenerateEvent
from mlx_parallm.types.request import GenerateRequest

T = TypeVar("T")


class OfflineEngines(Protocol):
    """One model, served to one caller at a time."""

    @property
    def model(self) -> GenerationModel | PoolingModel:
        """The model."""
        ...

    def events(self, requests: Sequence[GenerateRequest]) -> Generator[GenerateEvent]:
        """Yield the events of requests until all have ended; closing it ends those that have not.

        Raises:
            ParallmError: a request is refused; nothing was generated then.
        """
        ...

    def serve(self, work: Callable[[PoolingCalls], Coroutine[Any, Any, T]]) -> T:
        """Return what a coroutine gives that sends requests to the pooling model."""
        ...

    def train(self, work: Callable[[Train], Coroutine[Any, Any, T]]) -> T:
        """Return what a coroutine gives that has ops of training sessions run."""
        ...

    def adapters(self) -> Sequence[AdapterInfo]:
        """Return the loaded adapters."""
        ...

    def load_adapter(self, upload: AdapterUpload) -> AdapterInfo:
        """Load or replace an adapter; raise InvalidRequestError if it does not fit."""
        ...

    def unload_adapter(self, name: str) -> None:
        """Unload an adapter; raise NotFoundError if it is not loaded."""
        ...

    def sleep(self, level: int) -> None:
        """Free the memory of KV (level 1), and that of the weights too (level 2)."""
        ...

    def wake_up(self, tags: Sequence[str]) -> Sequence[str]:
        """Allocate the memory of these ``SLEEP_TAGS``; return those that are still asleep."""
        ...

    def close(self) -> None:
        """Free the model. Nothing may be called afterwards."""
        ...
