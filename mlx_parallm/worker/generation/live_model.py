"""A loaded model whose weights change, and which can give back its memory for a while."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from pathlib import Path

from mlx_parallm.adapters.tensors import HostTensor
from mlx_parallm.worker.device.properties import give_back_memory
from mlx_parallm.worker.generation.draft_model import DraftModel
from mlx_parallm.worker.generation.paths.base import ForwardPath
from mlx_parallm.worker.lora.adapter_store import AdapterStore
from mlx_parallm.worker.weights.model_weights import ModelWeights


class LiveModel:
    """Implements ``engine.live_weights.LiveModel``. No step may be in flight in any call."""

    def __init__(
        self,
        weights: ModelWeights,
        path: ForwardPath,
        adapters: AdapterStore,
        draft: DraftModel | None,
    ) -> None:
        self._weights = weights
        self._adapters = adapters
        self._path = path
        self._kv = [path] if draft is None else [path, draft]
        self._has_kv = True

    def replace_from_folder(self, folder: Path) -> None:
        """Let all weights be those of a checkpoint; if they cannot be, nothing is changed.

        Raises:
            InvalidRequestError: it cannot be read, or does not fit.
        """
        self._weights.put(self._weights.read_folder(folder), folder)
        self._heed()

    def replace_tensors(self, tensors: Mapping[str, HostTensor]) -> None:
        """Let some weights be these; if they cannot be, nothing is changed.

        Raises:
            InvalidRequestError: the model has none of these names and shapes, or numbers are not
                finite.
        """
        self._weights.put(self._weights.read_tensors(tensors))
        self._heed()

    def checksums(self) -> dict[str, str]:
        """SHA-256 of each weight, in hex by name."""
        return self._weights.checksums()

    def release_kv(self) -> None:
        """Give back the memory of KV and of adapters on the device."""
        if self._has_kv:
            for one in self._kv:
                one.release_kv()
            self._adapters.release()
            self._has_kv = False
        _give_back()

    def restore_kv(self) -> None:
        """Have memory for KV again, empty."""
        if not self._has_kv:
            for one in self._kv:
                one.restore_kv()
            self._has_kv = True

    def release_weights(self, *, keeps: bool) -> None:
        """Give back the memory of the weights; see ``ModelWeights.put_away``."""
        self._weights.put_away(keeps=keeps)
        self._path.forget_weights()
        _give_back()

    def restore_weights(self) -> bool:
        """Have weights again; whether they are those of the folder that was loaded last."""
        is_from_folder = self._weights.fetch()
        self._heed()
        return is_from_folder

    def _heed(self) -> None:
        self._path.forget_weights()
        self._adapters.renew()
        _give_back()


def _give_back() -> None:
    """Let the system have the memory of arrays that nobody holds."""
    gc.collect()
    give_back_memory()
