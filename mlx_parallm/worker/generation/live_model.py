"""A loaded model whose weights can be replaced, and which can free its memory for a while."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from mlx_parallm.adapters.tensors import HostTensor
from mlx_parallm.types.errors import OutOfMemoryError
from mlx_parallm.types.request import KV_CACHE, WEIGHTS
from mlx_parallm.worker.device.room import give_back
from mlx_parallm.worker.generation.draft_model import DraftModel
from mlx_parallm.worker.generation.paths.base import ForwardPath
from mlx_parallm.worker.lora.adapter_store import AdapterStore
from mlx_parallm.worker.weights.model_weights import Arrays, ModelWeights


class LiveModel:
    """Replaces, frees and restores a model's weights and KV; no step may be in flight meanwhile."""

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
        self._prepared: tuple[Arrays, Path | None] | None = None

    def prepare_folder(self, folder: Path) -> None:
        """Read all weights of a checkpoint, for ``commit``.

        Raises:
            InvalidRequestError: the checkpoint cannot be read, or does not fit the model.
        """
        self._prepared = self._weights.read_folder(folder), folder

    def prepare_tensors(self, tensors: Mapping[str, HostTensor]) -> None:
        """Check some weights and keep them for ``commit``.

        Raises:
            InvalidRequestError: a name or shape does not fit the model, or numbers are not finite.
        """
        self._prepared = self._weights.read_tensors(tensors), None

    def commit(self) -> None:
        """Replace the weights by the prepared ones; if that fails, the old ones stay."""
        assert self._prepared is not None, "nothing was prepared"
        (arrays, folder), self._prepared = self._prepared, None
        undo = self._weights.put(arrays, folder)
        try:
            self._refresh()
        except Exception:
            undo()
            self._path.forget_weights()
            # Some slots may have the gains of the new weights. Batches put their adapters anew.
            self._adapters.release()
            raise
        # It holds the old weights.
        del undo
        give_back()

    def drop_prepared(self) -> None:
        """Drop the prepared weights, if there are any."""
        self._prepared = None

    def checksums(self) -> dict[str, str]:
        """Return the SHA-256 of each weight, in hex by name."""
        return self._weights.checksums()

    def sleep(self, level: int) -> None:
        """See ``Sleep``."""
        self._prepared = None
        if self._has_kv:
            for pool in self._kv:
                pool.release_kv()
            self._adapters.release()
            self._has_kv = False
        keeps = level == 1
        if keeps:
            # Their copies need room beside them.
            give_back()
        self._weights.offload(keeps=keeps)
        self._path.forget_weights()
        give_back()

    def resize(self, num_blocks: int, before: int) -> None:
        """Allocate KV anew with so many blocks; ``before`` is how many it has. See ``Resize``."""
        assert self._has_kv, "it is asleep"
        self._reallocate(num_blocks, before)

    def _reallocate(self, num_blocks: int, before: int | None) -> None:
        for pool in self._kv:
            pool.release_kv()
        give_back()
        try:
            for pool in self._kv:
                pool.restore_kv(num_blocks)
        except OutOfMemoryError:
            if before is not None:
                self._reallocate(before, None)
            raise

    def wake(self, tag: str) -> bool:
        """See ``Wake``."""
        if tag == KV_CACHE and not self._has_kv:
            for pool in self._kv:
                pool.restore_kv()
            self._has_kv = True
        if tag != WEIGHTS:
            return False
        is_from_folder = self._weights.fetch()
        self._refresh()
        give_back()
        return is_from_folder

    def _refresh(self) -> None:
        """Update what depends on the weights, after these were replaced."""
        self._path.forget_weights()
        self._adapters.refresh()
