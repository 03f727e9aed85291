"""An adapter on its way into a slot: a part between every two steps."""

from __future__ import annotations

from collections.abc import Callable

from mlx_parallm.engine.policies import AdapterInfo, AdapterUpload, Policies


class AdapterStaging:
    """Puts an adapter into a slot in parts and then lets requests use it.

    Lives on the engine thread.

    Attributes:
        upload: the adapter.
        model: the first name of its base model.
    """

    def __init__(self, upload: AdapterUpload, model: str, *, in_parts: bool = True) -> None:
        """``in_parts``: whether to put it ahead of the first batch that names it."""
        self.upload = upload
        self.model = model
        self._in_parts = in_parts
        self._slot: int | None = None

    def advance(
        self, policies: Policies, check: Callable[[], None] = lambda: None
    ) -> AdapterInfo | None:
        """Put the next part; what is loaded, once all is there. Raises as ``Policies.load`` does.

        ``check`` raises whatever else refuses it.

        It is not to be called again after either, and what was put is then nobody's but the
        loaded adapter's.
        """
        has_more = False
        try:
            check()
            if self._in_parts and self._slot is None:
                self._slot = policies.begin(self.upload)
                self._in_parts = self._slot is not None
            if self._slot is not None:
                has_more = policies.store.stage(self._slot, self.upload.weights.digest)
            return None if has_more else policies.load(self.upload)
        finally:
            if self._slot is not None and not has_more:
                policies.end(self.upload)
