"""The names under which one model computes: itself, and its adapters."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from mlx_parallm.adapters.weights import AdapterWeights
from mlx_parallm.confinement import check_name
from mlx_parallm.engine.adapter_users import (
    AdapterHead,
    AdapterUsers,
    NoAdapters,
    TensorStore,
)
from mlx_parallm.types.content import PendingContent
from mlx_parallm.types.errors import (
    InvalidRequestError,
    ModelNotFoundError,
    NotFoundError,
    OverloadedError,
    VersionMismatchError,
)
from mlx_parallm.types.request import BaseWeights, PolicyWeights, WeightsVersion

# MAX_DIGITS: digits of a label that is a number, from which labels are counted on.
MAX_DIGITS = 18


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterUpload:
    """An adapter to be served.

    Attributes:
        name: that requests are to use.
        weights: parsed and checked.
        version: label of its tokens; None counts on from the version before.
        expected_version: it replaces this version and no other; None for any.
        replaces: True if an adapter of this name may be loaded already.
        is_pinned: True if it is never evicted from its slot; None leaves that as it was.
        source: the folder it came from; None for an upload.
        opaque: an id of what it computes, for adapters that the device makes; None for the digest
            of the weights.
        is_cached: False if no KV computed with it is kept for later requests.
    """

    name: str
    weights: AdapterWeights
    version: str | None = None
    expected_version: str | None = None
    replaces: bool = False
    is_pinned: bool | None = None
    source: str | None = None
    opaque: str | None = None
    is_cached: bool = True

    def __post_init__(self) -> None:
        """Check the name; see ``check_name``."""
        check_name(self.name)

    @property
    def content(self) -> str:
        """Return an id that is equal for adapters that compute the same."""
        return self.weights.digest if self.opaque is None else self.opaque

    def as_loaded(self, info: AdapterInfo) -> AdapterUpload:
        """Return what loads it at another engine as it is at those that have it."""
        return replace(
            self,
            version=info.version,
            expected_version=None,
            replaces=True,
            is_pinned=info.is_pinned,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterInfo:
    """A loaded adapter.

    Attributes:
        name: that requests use.
        model: the first name of its base model.
        version: label of the tokens that it makes now.
        digest: its content: the SHA-256 of what it changes, unless it was given an id.
        rank: the largest of its modules.
        num_bytes: of its tensors.
        created: Unix seconds of this version.
        source: the folder it came from; None for an upload.
        is_pinned: True if it is never evicted from its slot.
        is_resident: True if it has a slot.
        num_running: sequences that run with it; requests, where a request is no sequence.
        head: that it brings instead of its model's; None: it brings none.
    """

    name: str
    model: str
    version: str
    digest: str
    rank: int
    num_bytes: int
    created: int
    source: str | None = None
    is_pinned: bool = False
    is_resident: bool = False
    num_running: int = 0
    head: AdapterHead | None = None


@dataclass(frozen=True, slots=True)
class NamedAdapter:
    """An adapter that requests may name.

    Attributes:
        name: its own, without its model's.
        base: the first name of its model.
        source: the folder that it came from, or is to come from; None for an upload.
        info: None while it is not loaded: a request that names it loads it.
    """

    name: str
    base: str
    source: str | None
    info: AdapterInfo | None = None


@dataclass(slots=True)
class _Policy:
    """A named adapter. ``used`` is larger for those used later."""

    info: AdapterInfo
    weights: PolicyWeights
    used: int
    num_versions: int = 1


@dataclass(slots=True)
class Policies:
    """The weights that requests of one model are computed with, by name.

    It lives on the engine thread.

    Attributes:
        model: the model's first name.
        users: the requests; a model that takes no adapters needs not name them, nor the following.
        store: has the tensors.
        max_loaded: most adapters; beyond that, an idle one that came from a folder is evicted.
        max_rank: largest rank of an adapter.
        base: the model's own weights.
    """

    model: str
    users: AdapterUsers = field(default_factory=NoAdapters)
    store: TensorStore = field(default_factory=NoAdapters)
    max_loaded: int = 0
    max_rank: int = 0
    base: BaseWeights = field(default_factory=BaseWeights)
    _plain: PolicyWeights = field(init=False)
    _policies: dict[str, _Policy] = field(default_factory=dict[str, _Policy])
    _clock: count[int] = field(default_factory=count)
    # Contents that were unloaded while requests still use them.
    _leaving: set[str] = field(default_factory=set[str])

    def __post_init__(self) -> None:
        self._plain = PolicyWeights(self.base)

    def weights_of(self, name: str | None) -> PolicyWeights:
        """Return the weights of requests of an adapter, or of the model itself.

        Raises:
            ModelNotFoundError: no adapter has this name any more.
        """
        if name is None:
            return self._plain
        policy = self._policies.get(name)
        if policy is None:
            raise ModelNotFoundError(name)
        policy.used = next(self._clock)
        return policy.weights

    def has(self, name: str) -> bool:
        """True if an adapter of this name is loaded."""
        return name in self._policies

    def head_of(self, name: str) -> AdapterHead | None:
        """Return the head that a loaded adapter brings."""
        return self._policies[name].info.head

    def infos(self) -> list[AdapterInfo]:
        """Return the loaded adapters, by when they were first loaded."""
        return [self._info(policy) for policy in self._policies.values()]

    def lasting_contents(self) -> dict[str | None, str | None]:
        """Return the lasting contents of the model (None) and its adapters; any thread may ask."""
        known = {name: policy.weights for name, policy in dict(self._policies).items()}
        return {name: each.lasting_content for name, each in {None: self._plain, **known}.items()}

    def running(self) -> set[str]:
        """Return the names of adapters that sequences run with; any thread may ask."""
        known = dict(self._policies)
        return {name for name, each in known.items() if self.users.num_running(each.info.digest)}

    def load(
        self,
        upload: AdapterUpload,
        evicted: str | None = None,
        spared: Collection[str] = (),
    ) -> AdapterInfo:
        """Serve an adapter; a version that it replaces serves up to the next step.

        ``evicted`` is evicted for a new adapter, even if requests use it: those that were admitted
        go on. If it is not loaded, or None, and there is no room, the adapter that was used least
        recently, is idle and is not ``spared`` is evicted.

        Raises:
            VersionMismatchError: another version is there than was expected.
            InvalidRequestError: it does not fit the model, its name is taken, or there is no room.
            OverloadedError: there will be room once requests have ended.
        """
        self._check(upload)
        known = self._policies.get(upload.name)
        is_pinned = upload.is_pinned
        if is_pinned is None:
            is_pinned = known is not None and known.info.is_pinned
        replaced = self._find_room(evicted, spared) if known is None else None
        head = self.store.add(upload.content, upload.weights)
        policy = self._put(upload, known, is_pinned, head)
        # The other adapter is evicted last, when nothing can fail; its tensors may be the same.
        if replaced is not None:
            self.unload(replaced)
        self.forget_unused()
        return self._info(policy)

    def begin(self, upload: AdapterUpload, *, takes_slot: bool) -> int | None:
        """Keep the tensors of an adapter until ``end``, before ``load``; raise as ``load`` does.

        Returns:
            The slot that it can be staged in, if it ``takes_slot``; None if there is none.
        """
        self._check(upload)
        content = upload.content
        self.store.add(content, upload.weights)
        if not takes_slot or not self.users.adapters.is_available(content):
            return None
        return self.users.adapters.acquire(content)

    def end(self, upload: AdapterUpload, slot: int | None) -> None:
        """Give back the slot of ``begin``, and forget the adapter unless it was loaded."""
        content = upload.content
        if slot is not None:
            self.users.adapters.release(content)
        self._leaving.add(content)
        self.forget_unused()

    def ensure(
        self, upload: AdapterUpload, evicted: str | None = None, spared: Collection[str] = ()
    ) -> AdapterInfo:
        """Return the adapter of this name, and load it if there is none; see ``load``."""
        known = self._policies.get(upload.name)
        return self.load(upload, evicted, spared) if known is None else self._info(known)

    def evictable_for(self, name: str, spared: Collection[str] = ()) -> Sequence[str] | None:
        """Return what can be evicted for an adapter, the least recently used first.

        None: there is room, or an adapter of this name. Raises as ``load`` does.
        """
        if name in self._policies or len(self._policies) < self.max_loaded:
            return None
        idle = sorted(self._idle(spared), key=lambda policy: policy.used)
        return [policy.info.name for policy in idle]

    def unload(self, name: str) -> AdapterInfo:
        """Admit no more requests of an adapter; those that were admitted go on.

        Raises:
            NotFoundError: no adapter has this name.
        """
        policy = self._policies.pop(name, None)
        if policy is None:
            raise NotFoundError(f"The adapter {name!r} is not loaded.", param="name")
        info = self._info(policy)
        self._pin()
        self._leaving.add(info.digest)
        self.forget_unused()
        return info

    def replace_base(self, version: WeightsVersion, lasting: PendingContent | None = None) -> None:
        """Note that the model's own weights are others now, which changes all adapters too.

        ``lasting`` is their lasting content; None if it never becomes known.
        """
        self.base.version, self.base.lasting = version, lasting or PendingContent()
        self.users.refresh_weights()

    def forget_unused(self) -> None:
        """Free the tensors of adapters that were replaced or unloaded and that no request uses."""
        if not self._leaving:
            return
        self._leaving -= {policy.info.digest for policy in self._policies.values()}
        for content in list(self._leaving):
            if not self.users.uses(content) and self.users.adapters.forget(content):
                self.store.remove(content)
                self._leaving.discard(content)

    def _put(
        self,
        upload: AdapterUpload,
        known: _Policy | None,
        is_pinned: bool,
        head: AdapterHead | None,
    ) -> _Policy:
        num_versions = 1 if known is None else known.num_versions + 1
        label = upload.version or _next_label(known)
        version = WeightsVersion(
            upload.content, label, is_cached=upload.is_cached, is_lasting=upload.opaque is None
        )
        info = AdapterInfo(
            name=upload.name,
            model=self.model,
            version=version.label,
            digest=version.content,
            rank=upload.weights.rank,
            num_bytes=upload.weights.num_bytes,
            created=int(time.time()),
            source=upload.source,
            is_pinned=is_pinned,
            head=head,
        )
        if known is None:
            weights = PolicyWeights(self.base, version)
            policy = self._policies[upload.name] = _Policy(info, weights, next(self._clock))
            self._pin()
            return policy
        self._leaving.add(known.info.digest)
        known.info, known.num_versions = info, num_versions
        known.weights.adapter = version
        # This comes before the next search for a slot: the old content may have been pinned.
        self._pin()
        self.users.refresh_weights()
        return known

    def _check(self, upload: AdapterUpload) -> None:
        """Raise what ``load`` raises for the names, versions and sizes of an upload."""
        known = self._policies.get(upload.name)
        self._check_version(upload, known)
        if known is not None and not upload.replaces:
            raise InvalidRequestError(
                f"The adapter {upload.name!r} is loaded already.", param="name"
            )
        self._check_rank(upload.weights.rank)
        if upload.is_pinned:
            self._check_pins(upload.name)

    def _check_version(self, upload: AdapterUpload, known: _Policy | None) -> None:
        expected = upload.expected_version
        current = None if known is None else known.info.version
        if expected is not None and expected != current:
            have = "it is not loaded" if current is None else f"it is at {current!r}"
            raise VersionMismatchError(
                f"The adapter {upload.name!r} was expected at version {expected!r}; {have}.",
                param="expected_version",
            )

    def _check_pins(self, name: str) -> None:
        num_slots = self.users.adapters.num_slots
        policies = self._policies.values()
        pinned = {policy.info.name for policy in policies if policy.info.is_pinned} - {name}
        if len(pinned) + 1 >= num_slots:
            raise InvalidRequestError(
                f"{len(pinned)} of {num_slots} slots for adapters are pinned already; one must "
                "remain for the others.",
                param="pinned",
            )

    def _check_rank(self, rank: int) -> None:
        if rank > self.max_rank:
            raise InvalidRequestError(
                f"The adapter has rank {rank}; this server takes up to {self.max_rank} "
                "(--max-lora-rank).",
                param="adapter",
            )

    def _find_room(self, evicted: str | None, spared: Collection[str]) -> str | None:
        """Return the adapter to evict for one more; None if there is room."""
        if evicted in self._policies:
            return evicted
        if len(self._policies) < self.max_loaded:
            return None
        return min(self._idle(spared), key=lambda policy: policy.used).info.name

    def _idle(self, spared: Collection[str]) -> list[_Policy]:
        """Return the adapters that no request uses and that can come back; at least one."""
        movable = [
            policy
            for policy in self._policies.values()
            if policy.info.source is not None
            and not policy.info.is_pinned
            and policy.info.name not in spared
        ]
        idle = [policy for policy in movable if not self.users.uses(policy.info.digest)]
        if movable and not idle:
            raise OverloadedError("Requests use every adapter that could be evicted for another.")
        if not idle:
            raise InvalidRequestError(
                f"{len(self._policies)} adapters are loaded, which is the limit "
                "(--max-cpu-loras); unload one first.",
                param="name",
            )
        return idle

    def _pin(self) -> None:
        policies = self._policies.values()
        pinned = [policy.info.digest for policy in policies if policy.info.is_pinned]
        self.users.adapters.pin(pinned)

    def _info(self, policy: _Policy) -> AdapterInfo:
        slots = self.users.adapters
        digest = policy.info.digest
        return replace(
            policy.info,
            is_resident=digest in slots.resident,
            num_running=self.users.num_running(digest),
        )


def _next_label(known: _Policy | None) -> str:
    """Return the number after the label before; if that is none, after the count of versions."""
    if known is None:
        return "1"
    before = known.info.version
    is_number = before.isdecimal() and len(before) < MAX_DIGITS
    return str(int(before) + 1 if is_number else known.num_versions + 1)
