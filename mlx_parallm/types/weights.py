"""Which weights a request's tokens are computed with, and what tells them from others."""

from __future__ import annotations

from dataclasses import dataclass, field

#: The version of what was loaded at start, as vLLM and SGLang call it.
DEFAULT_VERSION = "default"


@dataclass(frozen=True, slots=True)
class WeightsVersion:
    """A state of a base model or of an adapter.

    Attributes:
        content: tells the tensors from all others: a digest; empty for a base model as it was
            loaded.
        label: what clients call it; every token that it makes carries it.
    """

    content: str = ""
    label: str = DEFAULT_VERSION


@dataclass(slots=True, eq=False)
class BaseWeights:
    """The weights of a loaded model as they stand now; replaced between two steps."""

    version: WeightsVersion = field(default_factory=WeightsVersion)


@dataclass(slots=True, eq=False)
class PolicyWeights:
    """What the requests of one name are computed with, as it stands now.

    All requests of the name share it. Between two steps it may become another: those that run go
    on with that.

    Attributes:
        base: of the model.
        adapter: None for the model itself.
    """

    base: BaseWeights = field(default_factory=BaseWeights)
    adapter: WeightsVersion | None = None

    @property
    def label(self) -> str:
        """The version that tokens carry."""
        return (self.adapter or self.base.version).label

    @property
    def content(self) -> str:
        """The same of two where, and only where, they compute the same KV."""
        adapter = "" if self.adapter is None else self.adapter.content
        return f"{self.base.version.content}/{adapter}"
