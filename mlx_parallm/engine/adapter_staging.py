"""An adapter on its way into a slot: a part between every two steps."""

from __future__ import annotations

from collections.abc import Callable

from mlx_parallm.engine.policies import AdapterInfo, AdapterUpload, Policies


def _accept() -> None:
    """Refuse nothing."""


class AdapterStaging:
    """Puts an adapter into a slot in parts, and then lets requests use it.

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
        self._has_begun = False
        self._slot: int | None = None
        self._is_staged = False

    def prepare(self, policies: Policies, check: Callable[[], None] = _accept) -> bool:
        """Put the next part; return True if there is more.

        Raises as ``Policies.load`` does; what was put is then dropped. ``check`` raises whatever
        else refuses the adapter.
        """
        try:
            check()
            if not self._has_begun:
                self._slot = policies.begin(self.upload, takes_slot=self._in_parts)
                self._has_begun = True
            if self._slot is None or self._is_staged:
                return False
            self._is_staged = not policies.store.stage(self._slot, self.upload.content)
        except BaseException:
            self.drop(policies)
            raise
        return not self._is_staged

    def commit(self, policies: Policies, check: Callable[[], None] = _accept) -> AdapterInfo:
        """Let requests use the adapter; raise as ``prepare`` does."""
        try:
            check()
            return policies.load(self.upload)
        finally:
            self.drop(policies)

    def drop(self, policies: Policies) -> None:
        """Give back the slot; the adapter is forgotten unless it was loaded."""
        if self._has_begun:
            policies.end(self.upload, self._slot)
        self._has_begun = False
