"""One model's own weights while it serves: their versions, and what sleep has freed."""

from __future__ import annotations

from collections.abc import Collection, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from mlx_parallm.adapters.tensors import HostTensor
from mlx_parallm.engine.policies import Policies
from mlx_parallm.models.checkpoints.contents import FolderContents, SeenFolder
from mlx_parallm.models.checkpoints.copies import Copy, check_copy
from mlx_parallm.types.content import PendingContent, passing_content, updated_content
from mlx_parallm.types.errors import ConfigError, InvalidRequestError, VersionMismatchError
from mlx_parallm.types.request import KV_CACHE, SLEEP_TAGS, WEIGHTS, WeightsVersion

if TYPE_CHECKING:
    from mlx_parallm.engine.device import DeviceWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsUpdate:
    """New weights for a model: a whole checkpoint, or some of its tensors.

    Attributes:
        folder: of the checkpoint; None for tensors.
        tensors: by their names in the checkpoint; None for a folder.
        version: label of the tokens that they make; None counts on.
        expected_version: they replace this version and no other; None for any.
        copy: the folder on the server's machine, for engines on others; None: it is not compared.
    """

    folder: Path | None = None
    tensors: Mapping[str, HostTensor] | None = None
    version: str | None = None
    expected_version: str | None = None
    copy: Copy | None = None


@dataclass(frozen=True, slots=True)
class WeightsHistory:
    """Difference of a model's weights from those that it is loaded with.

    Attributes:
        folder: the update from a folder that replaced all of them; None if there was none.
        tensors: the updates since, joined; None if there was none.
        version: as it is now.
        folder_version: the version that came with ``folder``.
        num_updates: how many updates there were.
    """

    folder: WeightsUpdate | None = None
    tensors: WeightsUpdate | None = None
    version: WeightsVersion = field(default_factory=WeightsVersion)
    folder_version: WeightsVersion = field(default_factory=WeightsVersion)
    num_updates: int = 0

    def updated(self, update: WeightsUpdate, version: WeightsVersion) -> WeightsHistory:
        """Return the history with an update, which gave the weights a version."""
        update = replace(update, version=version.label, expected_version=None)
        after = replace(self, version=version, num_updates=self.num_updates + 1)
        if update.folder is not None:
            return replace(after, folder=update, tensors=None, folder_version=version)
        before = {} if self.tensors is None else self.tensors.tensors or {}
        joined = replace(update, tensors={**before, **(update.tensors or {})})
        return replace(after, tensors=joined)

    def evicted(self) -> WeightsHistory:
        """Return the history once its model was evicted: it is loaded with this version again."""
        return WeightsHistory(version=self.version, folder_version=self.version)


class PrefixCache(Protocol):
    """The cached blocks that were computed with a model's weights."""

    def reset_prefix_cache(self, *, reset_running: bool) -> None:
        """Forget them; ``reset_running`` recomputes those of running requests."""
        ...


@dataclass(slots=True)
class LiveWeights:
    """Replaces, labels and frees the weights of one model.

    Lives on the engine thread. No step may be in flight during a call.

    Attributes:
        policies: the names under which the model computes; their base are these weights.
        model: has the arrays.
        scheduler: has the blocks that were computed with the weights.
        contents: finds the contents of folders.
        read: the folder that all weights were read from last.
        asleep: those of ``SLEEP_TAGS`` whose memory is released.
    """

    policies: Policies
    model: DeviceWeights
    scheduler: PrefixCache
    contents: FolderContents = field(default_factory=FolderContents)
    read: SeenFolder = field(default_factory=SeenFolder)
    asleep: set[str] = field(default_factory=set[str])
    _num_updates: int = 0
    _prepared: WeightsUpdate | None = None
    # The folder of the prepared update.
    _seen: SeenFolder = field(default_factory=SeenFolder)
    # The version of the folder that was loaded last.
    _loaded: WeightsVersion = field(init=False)

    def __post_init__(self) -> None:
        self._loaded = self.version
        self.policies.base.lasting = self.read

    def begin_hashing(self) -> None:
        """Find the content of the weights on another thread, unless it is known."""
        self.contents.hash(self.read)

    def end_hashing(self) -> None:
        """Give up what ``begin_hashing`` or an update has begun."""
        self.contents.stop()

    @property
    def version(self) -> WeightsVersion:
        """Return the version of the current weights."""
        return self.policies.base.version

    def prepare(self, update: WeightsUpdate) -> None:
        """Prepare new weights beside those in use; weights that were prepared before are dropped.

        Raises:
            VersionMismatchError: another version is there than was expected.
            InvalidRequestError: the update does not fit.
            OutOfMemoryError: there is no memory for it.
        """
        self.drop_prepared()
        self._check_version(update)
        with self._dropping():
            if update.folder is not None:
                _check_copy(update.copy)
                seen = self.contents.see(update.folder)
                self.model.prepare_folder(update.folder)
                self._seen = self.contents.confirm(seen)
            elif update.tensors:
                self.model.prepare_tensors(update.tensors)
            else:
                problem = "An update must have a folder or tensors."
                raise InvalidRequestError(problem, param="weights")
        self._prepared = update

    @contextmanager
    def _dropping(self) -> Generator[None]:
        """Free what the context has prepared if it fails, however far it came."""
        try:
            yield
        except Exception:
            self.model.drop_prepared()
            raise

    def drop_prepared(self) -> None:
        """Forget prepared weights, if there are any."""
        if self._prepared is not None:
            self._prepared = None
            self.model.drop_prepared()

    def _check_version(self, update: WeightsUpdate) -> None:
        if update.expected_version not in (None, self.version.label):
            raise VersionMismatchError(
                f"The weights were expected at version {update.expected_version!r}; they are at "
                f"{self.version.label!r}.",
                param="expected_version",
            )

    def commit(self, digest: str | None = None) -> WeightsVersion:
        """Compute with the prepared weights; requests that run go on with them.

        ``digest`` is that of prepared tensors; None if it is not known.

        Raises:
            InvalidRequestError: none are prepared.
            OutOfMemoryError: there is no memory for it; the old weights stay.
        """
        update, self._prepared = self._prepared, None
        if update is None:
            raise InvalidRequestError("No new weights are prepared.", param="weights")
        with self._dropping():
            self.model.commit()
        if update.folder is not None:
            self.asleep.discard(WEIGHTS)
        self._num_updates += 1
        label = update.version or str(self._num_updates)
        if update.folder is None:
            content, lasting = self._changed_by(digest)
        else:
            content, lasting = self._seen.digest or passing_content(), self._seen
        version = WeightsVersion(content, label)
        self.policies.replace_base(version, lasting)
        if update.folder is not None:
            self.read, self._loaded = self._seen, version
            self.begin_hashing()
        return version

    def _changed_by(self, digest: str | None) -> tuple[str, PendingContent]:
        """Return the contents of the weights after an update by tensors with this digest."""
        if digest is None:
            return passing_content(), PendingContent()
        before = self.policies.base.lasting.digest
        lasting = None if before is None else updated_content(before, digest)
        return updated_content(self.version.content, digest), PendingContent(lasting)

    def checksums(self) -> dict[str, str]:
        """Return the SHA-256 of each weight, in hex by name; raise InvalidRequestError in sleep."""
        if WEIGHTS in self.asleep:
            raise InvalidRequestError(
                "The weights are not in memory, because the server is asleep; wake it up first."
            )
        return self.model.checksums()

    def relabel(self, label: str) -> WeightsVersion:
        """Give the current weights another label, from the next token on."""
        self.policies.base.version = replace(self.version, label=label)
        return self.version

    def restore(self, history: WeightsHistory) -> None:
        """Give the current weights the version that other engines have for them."""
        self._num_updates, self._loaded = history.num_updates, history.folder_version
        # The lasting content is of what was read here.
        self.policies.replace_base(history.version, self.policies.base.lasting)

    def sleep(self, level: int) -> None:
        """Free the memory of KV (level 1), and that of the weights too (level 2).

        At level 1 weights move to the host's memory where the device has its own. At level 2 they
        are read again from the folder that was loaded last, so that tensors that were updated
        since are lost.
        """
        self.scheduler.reset_prefix_cache(reset_running=True)
        self._prepared = None
        self.model.sleep(level)
        self.asleep = set(SLEEP_TAGS)

    def wake(self, tags: Collection[str]) -> None:
        """Allocate again the memory of these tags."""
        if WEIGHTS in self.asleep and WEIGHTS in tags:
            seen = self.contents.see(self.read.folder)
            if self.model.wake(WEIGHTS):
                self._note_reading(self.contents.confirm(seen))
            self.asleep.discard(WEIGHTS)
        if KV_CACHE in self.asleep and KV_CACHE in tags:
            self.model.wake(KV_CACHE)
            self.asleep.discard(KV_CACHE)

    def _note_reading(self, seen: SeenFolder) -> None:
        """Note that the folder that was loaded last was read again, which may have changed."""
        if not seen.is_like(self.read):
            self._loaded = replace(self._loaded, content=seen.digest or passing_content())
        self.read = seen
        self.policies.replace_base(self._loaded, seen)
        self.begin_hashing()


def _check_copy(copy: Copy | None) -> None:
    try:
        if copy is not None:
            check_copy(copy)
    except ConfigError as problem:
        raise InvalidRequestError(str(problem), param="weights") from None
