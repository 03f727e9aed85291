"""Former settings: accepted for one more version, with a warning, and hidden from ``--help``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from mlx_parallm.cli import setting_values as values
from mlx_parallm.cli.setting import BATCHING, MEMORY, REQUESTS, STORAGE, Setting
from mlx_parallm.cli.setting_values import Parse
from mlx_parallm.cli.settings import SETTINGS
from mlx_parallm.types.errors import ConfigError

#: ``RENAMED``: former names of settings, and their names now.
RENAMED = {
    "max-adapter-size": "max-adapter-bytes",
    "max-weights-size": "max-weights-bytes",
    "encoder-memory": "pooling-memory-bytes",
    "media-timeout-s": "media-timeout",
    "max-body-size": "max-body-bytes",
    "max-body-size-per-key": "max-body-bytes-per-key",
    "max-stored-responses-size": "max-stored-responses-bytes",
    "max-file-size": "max-file-bytes",
}


@dataclass(frozen=True, slots=True)
class FormerSetting:
    """A setting that goes with the next version, and is read as before until then.

    Attributes:
        setting: what is read; for a renamed setting, the present one by its former name.
        new: the name of the setting that replaces it; None: there is none.
        advice: what to do instead, for a sentence that begins with "use".
    """

    setting: Setting
    new: str | None
    advice: str

    @property
    def name(self) -> str:
        """Its name."""
        return self.setting.name

    @property
    def is_renamed(self) -> bool:
        """True if ``new`` is the same setting."""
        return self.name in RENAMED


def _folded(
    name: str, target: str, parse: Parse, group: str, new: str | None, advice: str
) -> FormerSetting:
    setting = Setting(name=name, target=target, parse=parse, group=group, help="")
    return FormerSetting(setting, new, advice)


DATA, BODY, CACHE = "max-data-bytes", "max-body-bytes", "result-cache-bytes"
#: ``FOLDED``: settings of which others set the fields now.
FOLDED = (
    _folded("encoder-cache-size", "encoders.cache_bytes", values.size_or_none, MEMORY,
            CACHE, f"{CACHE}, which is for every cache of a model's results"),
    _folded("training-cache", "server.training_cache_bytes", values.size_or_none, MEMORY,
            CACHE, f"{CACHE}, which is for every cache of a model's results"),
    _folded("max-batch-wait-ms", "encoders.max_batch_wait_ms", values.number(0), BATCHING,
            None, "nothing: the inputs that have come are a batch, and none waits for others"),
    _folded("max-image-bytes", "media.max_bytes", values.size, REQUESTS,
            BODY, f"{BODY}, of which an image's file may have a third, and 20MiB at least"),
    _folded("max-tokenize-bytes", "server.max_tokenize_bytes", values.size, REQUESTS,
            BODY, f"{BODY}, of which such a body may have an eighth, and 1MiB at least"),
    _folded("max-stored-responses", "server.max_stored_responses", values.integer(0), REQUESTS,
            "max-stored-responses-bytes", "max-stored-responses-bytes, which allows a response "
            "for each 256KiB, and 1024 at least; with 0 there are none"),
    _folded("max-files-size", "server.max_files_bytes", values.size, STORAGE,
            DATA, f"{DATA}, nine twentieths of which are for files"),
    _folded("max-training-size", "server.max_training_bytes", values.size, STORAGE,
            DATA, f"{DATA}, half of which is for training sessions"),
    _folded("max-training-session-size", "server.max_training_session_bytes", values.size, STORAGE,
            DATA, f"{DATA}, of which a session may have a twentieth"),
    _folded("max-training-sessions", "server.max_training_sessions", values.integer(0), STORAGE,
            DATA, f"{DATA}, which allows a session for each 200MiB"),
)  # fmt: skip


def _renamed() -> Iterable[FormerSetting]:
    present = {setting.name: setting for setting in SETTINGS}
    for name, new in RENAMED.items():
        yield FormerSetting(replace(present[new], name=name, aliases=()), new, new)


FORMER_SETTINGS = (*_renamed(), *FOLDED)


def check_names(sources: Mapping[str, str]) -> None:
    """Raise ConfigError if a former setting and the one that replaces it are both given.

    ``sources`` has the names that are given in one place, and how a message names each there.
    """
    for former in FORMER_SETTINGS:
        if former.new is not None and former.name in sources and former.new in sources:
            raise ConfigError(
                f"{sources[former.name]} and {sources[former.new]}: {former.new} replaces "
                f"{former.name}; give only one of them"
            )


def overridden_by(names: Iterable[str]) -> set[str]:
    """Return the settings that count no more where one of these is given later."""
    names = set(names)
    overridden = {former.name for former in FORMER_SETTINGS if former.new in names}
    return overridden | {RENAMED[name] for name in names & RENAMED.keys()}


def warning_of(former: FormerSetting, source: str) -> str:
    """Return the warning for a former setting that ``source`` gives."""
    return (
        f"{source} goes with the next version, and is read as before until then; "
        f"use {former.advice}"
    )
