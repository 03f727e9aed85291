"""Uploads an adapter into a slot in parts: one part between two steps."""

from __future__ import annotations

from collections.abc import Collection

from mlx_parallm.engine.policies import AdapterInfo, AdapterUpload, Policies


class AdapterStaging:
    """Puts an adapter into a slot in parts, and then lets requests use it.

    Lives on the engine thread. ``drop`` ends it, after ``commit`` or instead of it.

    Attributes:
        upload: the adapter.
        policies: those of its model.
    """

    def __init__(
        self, upload: AdapterUpload, policies: Policies, *, takes_slot: bool = True
    ) -> None:
        """Begin; raise as ``Policies.load`` does.

        Args:
            upload: see the class.
            policies: see the class.
            takes_slot: whether to put it into a slot ahead of the first batch that names it.
        """
        self.upload = upload
        self.policies = policies
        self._slot = policies.begin(upload, takes_slot=takes_slot)

    def advance(self) -> bool:
        """Upload the next part; return True if there is more."""
        if self._slot is None:
            return False
        return self.policies.store.stage(self._slot, self.upload.content)

    def commit(self, evicted: str | None = None, spared: Collection[str] = ()) -> AdapterInfo:
        """Let requests use the adapter; see ``Policies.load``."""
        return self.policies.load(self.upload, evicted, spared)

    def drop(self) -> None:
        """Give back the slot; the adapter is forgotten unless it was committed."""
        self.policies.end(self.upload, self._slot)
