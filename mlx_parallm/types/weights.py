"""Versions of weights: which ones a request runs with, and the ids that distinguish them."""

from __future__ import annotations

from dataclasses import dataclass, field

#: ``DEFAULT_VERSION`` is the label of the weights loaded at start, as in vLLM and SGLang.
DEFAULT_VERSION = "default"
#: What a sleeping model has freed, by vLLM's names.
WEIGHTS, KV_CACHE = "weights", "kv_cache"
SLEEP_TAGS = (WEIGHTS, KV_CACHE)
#: The level of sleep from which weights are read again from the folder.
DROPS_WEIGHTS = 2


@dataclass(frozen=True, slots=True)
class WeightsVersion:
    """A state of a base model or of an adapter.

    Attributes:
        content: an id of what it computes, such as a digest of the tensors; empty for a base model
            as it was loaded.
        label: its name for clients; every token computed with it carries the label.
        is_cached: False if no KV computed with it may be found again, as with weights that change
            at every step.
    """

    content: str = ""
    label: str = DEFAULT_VERSION
    is_cached: bool = True


@dataclass(slots=True, eq=False)
class BaseWeights:
    """The current weights of a loaded model; an update replaces ``version`` between two steps."""

    version: WeightsVersion = field(default_factory=WeightsVersion)


@dataclass(slots=True, eq=False)
class PolicyWeights:
    """The current weights of one served name; all requests of the name share this object.

    An update changes it between two steps; running requests continue with the new weights.

    Attributes:
        base: the model's weights.
        adapter: the adapter's version; None for the model itself.
    """

    base: BaseWeights = field(default_factory=BaseWeights)
    adapter: WeightsVersion | None = None

    @property
    def label(self) -> str:
        """The version label of the tokens computed now."""
        return (self.adapter or self.base.version).label

    @property
    def is_cached(self) -> bool:
        """False if no KV computed now may be found by another request."""
        return self.base.version.is_cached and (self.adapter is None or self.adapter.is_cached)

    @property
    def content(self) -> str:
        """KV cache key: equal iff both compute identical KV."""
        adapter = "" if self.adapter is None else self.adapter.content
        return f"{self.base.version.content}/{adapter}"
