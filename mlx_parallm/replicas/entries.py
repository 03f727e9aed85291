"""Committed changes as every server of a fleet numbers them, and the journal of those that last."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.json_values import is_list, is_object

#: ``Head``: a change as JSON, without its tensors: "kind" and the kind's own fields.
Head = Mapping[str, Any]

#: GENESIS: digest of a server that no change has reached.
GENESIS = ""
#: MIXED: digest of a server that stopped on its way to another state; it is like no other one.
MIXED = "mixed"
LOAD_ADAPTER, UNLOAD_ADAPTER = "load_adapter", "unload_adapter"
UPDATE_WEIGHTS, LABEL_WEIGHTS, BASE_WEIGHTS = "update_weights", "label_weights", "base_weights"
PAUSE, RESUME = "pause", "resume"
SLEEP, WAKE = "sleep", "wake"
EMPTY_CACHES = "empty_caches"
LOAD_MODEL, UNLOAD_MODEL = "load_model", "unload_model"
KEEP = "keep"
# MAX_DIGITS: of a label that counts as a number.
MAX_DIGITS = 15
#: DECIDED_FIRST: changes that cannot fail, and whose end may take as long as requests do: a fleet
#: counts them as committed before.
DECIDED_FIRST = frozenset({PAUSE, SLEEP, UNLOAD_MODEL})
_ADAPTERS = frozenset({LOAD_ADAPTER, UNLOAD_ADAPTER})
_WEIGHTS = frozenset({UPDATE_WEIGHTS, LABEL_WEIGHTS})
_SLEEPS = frozenset({SLEEP, WAKE})
_MODELS = frozenset({LOAD_MODEL, UNLOAD_MODEL})
DROPS_WEIGHTS = 2


@dataclass(frozen=True, slots=True)
class Rest:
    """The tensors of an update that are needed: their names, and the SHA-256 of their file."""

    names: tuple[str, ...]
    content: str


@dataclass(frozen=True, slots=True)
class Entry:
    """A change with its place among all.

    Attributes:
        number: larger than that of every change before.
        parent: the digest of the state that it changes.
        head: the change.
        content: the SHA-256 of its tensors, in hex; None if it has none.
        coordinator: the server that it reached first.
        kept: what is needed of its tensors after later updates; None: all of them.
        digest: of all this, and so of the state after it.
    """

    number: int
    parent: str
    head: Head
    content: str | None
    coordinator: str
    kept: Rest | None = field(default=None, compare=False)
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        parts = [self.number, self.parent, self.head, self.content, self.coordinator]
        text = json.dumps(parts, sort_keys=True)
        object.__setattr__(self, "digest", hashlib.sha256(text.encode()).hexdigest())

    @property
    def kind(self) -> str:
        """Return the kind of the change."""
        return self.head["kind"]

    @property
    def label(self) -> str | None:
        """Return the label of the version that it makes; None if it makes none."""
        return self.head.get("version")

    @property
    def highest(self) -> int:
        """Return the largest number that no later change may have: its own, or its label."""
        return max(self.number, number_of(self.label or ""))

    @property
    def rest(self) -> Head:
        """Return the change as far as it is needed."""
        return self.head if self.kept is None else {**self.head, "names": list(self.kept.names)}

    @property
    def rest_content(self) -> str | None:
        """Return the SHA-256 of the tensors that are needed; None if there are none."""
        return self.content if self.kept is None else self.kept.content

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON; see ``from_json``."""
        kept = self.kept
        return {
            "number": self.number,
            "parent": self.parent,
            "head": dict(self.head),
            "content": self.content,
            "coordinator": self.coordinator,
            "kept": None if kept is None else {"names": kept.names, "content": kept.content},
        }

    @staticmethod
    def from_json(value: Any) -> Entry:
        """Return the entry of a JSON value; raise InvalidRequestError if it is none."""
        if is_object(value):
            number, parent, head = value.get("number"), value.get("parent"), value.get("head")
            content, coordinator = value.get("content"), value.get("coordinator")
            if (
                isinstance(number, int)
                and isinstance(parent, str)
                and is_object(head)
                and _is_head(head)
                and (content is None or isinstance(content, str))
                and isinstance(coordinator, str)
            ):
                return Entry(number, parent, head, content, coordinator, _kept(value.get("kept")))
        raise InvalidRequestError("This is no change of a fleet.", param="entry")


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_label(value: Any) -> bool:
    return value is None or isinstance(value, str)


def _is_number(value: Any) -> bool:
    return isinstance(value, int)


def _are_texts(value: Any) -> bool:
    return is_list(value) and all(isinstance(each, str) for each in value)


# _FIELDS: what a journal reads of a change of each kind; the codec checks the rest.
_FIELDS: Mapping[str, Mapping[str, Callable[[Any], bool]]] = {
    LOAD_ADAPTER: {"name": _is_text, "model": _is_text, "version": _is_label, "evicted": _is_label},
    UNLOAD_ADAPTER: {"name": _is_text},
    UPDATE_WEIGHTS: {
        "model": _is_text,
        "version": _is_label,
        "folder": _is_label,
        "names": _are_texts,
    },
    LABEL_WEIGHTS: {"model": _is_text, "version": _is_text},
    PAUSE: {"mode": _is_text},
    RESUME: {},
    SLEEP: {"level": _is_number, "mode": _is_text},
    WAKE: {"tags": _are_texts},
    EMPTY_CACHES: {},
    LOAD_MODEL: {"name": _is_text, "model": _is_text},
    UNLOAD_MODEL: {"name": _is_text},
}


def _kept(value: Any) -> Rest | None:
    if value is None:
        return None
    if is_object(value) and _are_texts(value.get("names")) and _is_text(value.get("content")):
        return Rest(tuple(value["names"]), value["content"])
    raise InvalidRequestError("This is no change of a fleet.", param="entry")


def _is_head(head: Mapping[str, Any]) -> bool:
    kind = head.get("kind")
    fields = _FIELDS.get(kind) if isinstance(kind, str) else None
    return fields is not None and all(check(head.get(name)) for name, check in fields.items())


def number_of(label: str) -> int:
    """Return the number that a label is; 0 if it is none."""
    is_number = label.isascii() and label.isdecimal() and len(label) <= MAX_DIGITS
    return int(label) if is_number else 0


#: ``Journal``: the entries that a fresh server needs to be like the others, in their order.
Journal = tuple[Entry, ...]


def journaled(journal: Journal, entry: Entry) -> Journal:
    """Return the journal with one more entry, without what it makes needless."""
    gone = [old for old in journal if supersedes(entry.rest, old.rest)]
    kept = tuple(old for old in journal if old not in gone)
    return (*kept, entry) if _lasts(entry.head, [old.kind for old in gone]) else kept


def supersedes(new: Head, old: Head) -> bool:
    """True if an earlier change leaves nothing once a later one is carried out."""
    kind, before = new["kind"], old["kind"]
    if kind in _ADAPTERS:
        return before in _ADAPTERS and old["name"] in (new["name"], new.get("evicted"))
    if kind in _WEIGHTS:
        return before in _WEIGHTS and new["model"] == old["model"] and _covers(new, old)
    if kind in (PAUSE, RESUME):
        return before == PAUSE
    if kind == SLEEP:
        return before in _SLEEPS or (new["level"] >= DROPS_WEIGHTS and _is_in_memory(old))
    if kind == WAKE:
        return before in _SLEEPS and _wakes_all(new)
    if kind == UNLOAD_MODEL:
        is_of_model = before in _ADAPTERS | _WEIGHTS and old.get("model") == new["name"]
        return is_of_model or (before in _MODELS and new["name"] == old["name"])
    return kind in _MODELS and before in _MODELS and new["name"] == old["name"]


def _covers(new: Head, old: Head) -> bool:
    if old["kind"] == LABEL_WEIGHTS or new["kind"] == LABEL_WEIGHTS:
        return old["kind"] == LABEL_WEIGHTS
    if new["folder"] is not None:
        return True
    return old["folder"] is None and set(old["names"]) <= set(new["names"])


def _is_in_memory(head: Head) -> bool:
    """True if a level of sleep that frees weights loses a change."""
    kind = head["kind"]
    return kind == LABEL_WEIGHTS or (kind == UPDATE_WEIGHTS and head["folder"] is None)


def _wakes_all(head: Head) -> bool:
    return {"weights", "kv_cache"} <= set(head["tags"])


def _lasts(head: Head, gone: Sequence[str]) -> bool:
    """True if a fresh server needs a change; ``gone`` are the kinds that it supersedes."""
    kind = head["kind"]
    if kind in (RESUME, EMPTY_CACHES) or (kind == WAKE and _wakes_all(head)):
        return False
    # What a fresh server never loads needs not be unloaded there.
    if kind == UNLOAD_ADAPTER:
        return LOAD_ADAPTER not in gone
    return not (kind == UNLOAD_MODEL and LOAD_MODEL in gone)


@dataclass(frozen=True, slots=True)
class Step:
    """A change on the way to another state; ``entry`` is None for one that undoes something."""

    head: Head
    entry: Entry | None = None


def way(own: Journal, target: Journal, *, is_mixed: bool = False) -> Sequence[Step]:
    """Return the changes that bring a server from its journal's state to another one's, in order.

    Weights that the other state never had are read anew from their model's folder first.
    ``is_mixed``: the server may have any of its journal's changes, or none.
    """
    wanted = set() if is_mixed else {entry.digest for entry in target}
    known = set() if is_mixed else {entry.digest for entry in own}
    missing = [entry for entry in target if entry.digest not in known]
    extra = [entry for entry in own if entry.digest not in wanted]
    left = [old for old in extra if not any(supersedes(new.rest, old.rest) for new in missing)]
    rebuilt = {old.head["model"] for old in left if old.kind in _WEIGHTS}
    again = [
        entry
        for entry in target
        if entry in missing or (entry.kind in _WEIGHTS and entry.head["model"] in rebuilt)
    ]
    undone = [Step(head) for old in left for head in _undoing(old)]
    undone += [Step({"kind": BASE_WEIGHTS, "model": model}) for model in sorted(rebuilt)]
    return [*undone, *(Step(_restoring(entry, again), entry) for entry in again)]


def _restoring(entry: Entry, steps: Sequence[Entry]) -> Head:
    """Return a change as it is carried out by a server that comes later."""
    head = entry.rest
    if entry.kind == LOAD_ADAPTER:
        return {**head, "expected_version": None, "replaces": True}
    if entry.kind in (PAUSE, SLEEP):
        # Requests here do not keep the server from becoming like the others.
        return {**head, "mode": KEEP}
    if entry.kind != UPDATE_WEIGHTS:
        return head
    last = [
        each
        for each in steps
        if each.kind == UPDATE_WEIGHTS and each.head["model"] == head["model"]
    ][-1]
    # Changes that came between are needless by now, so its label had more than this.
    label = entry.label if entry is last else f"catching-up-{secrets.token_hex(4)}"
    return {**head, "expected_version": None, "version": label}


def _undoing(entry: Entry) -> Iterable[Head]:
    """Yield what makes a change undone, of which the target has nothing."""
    head = entry.head
    match entry.kind:
        case "load_adapter":
            yield {"kind": UNLOAD_ADAPTER, "name": head["name"], "model": head["model"]}
        case "pause":
            yield {"kind": RESUME}
        case "sleep":
            yield {"kind": WAKE, "tags": ["weights", "kv_cache"]}
        case "load_model":
            yield {"kind": UNLOAD_MODEL, "name": head["name"]}
        case "unload_model":
            yield {"kind": LOAD_MODEL, "name": head["name"], "model": head["name"]}
        case _:
            return
