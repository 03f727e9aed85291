"""Cuts out of a journal what later updates by tensors have replaced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mlx_parallm.adapters.safetensors import MODEL_DTYPES, read_safetensors, write_file
from mlx_parallm.replicas.entries import UPDATE_WEIGHTS, Entry, Journal
from mlx_parallm.replicas.host import Content


def needed_names(journal: Journal) -> Mapping[str, Sequence[str]]:
    """Return what later updates leave of earlier ones, by digest; only where that is less."""
    needed: dict[str, Sequence[str]] = {}
    replaced: dict[str, set[str]] = {}
    for entry in reversed(journal):
        if entry.kind == UPDATE_WEIGHTS and entry.rest["folder"] is None:
            later = replaced.setdefault(entry.rest["model"], set())
            names = [name for name in entry.rest["names"] if name not in later]
            if len(names) < len(entry.rest["names"]):
                needed[entry.digest] = names
            later.update(names)
    return needed


def only(content: Content, names: Sequence[str]) -> bytes:
    """Return a safetensors file with some of another one's tensors."""
    tensors = read_safetensors(content, param="entry", dtypes=MODEL_DTYPES)
    return write_file({name: tensors[name] for name in names}, {})


def shrunk(journal: Journal, whole: Entry, rest: Entry | None) -> Journal:
    """Return a journal with what is needed of an entry; ``rest`` is None for nothing."""
    left = [rest if entry is whole else entry for entry in journal]
    return tuple(entry for entry in left if entry is not None)
