"""Truncation of prompts and inputs."""

from __future__ import annotations

from collections.abc import Sequence


def cut_ids(
    token_ids: tuple[int, ...],
    length: int,
    *,
    from_left: bool,
    begin: tuple[int, ...] = (),
    end: tuple[int, ...] = (),
) -> tuple[int, ...]:
    """Return at most ``length`` of the ids: the first ones, or with ``from_left`` the last ones.

    Args:
        token_ids: ids of a prompt or an input.
        length: most ids to return.
        from_left: drop ids at the beginning, not at the end.
        begin: special tokens to keep at the beginning if the ids begin with them.
        end: special tokens to keep at the end if the ids end with them.
    """
    if len(token_ids) <= length:
        return token_ids
    # Ids without special tokens get none.
    has_begin = token_ids[: len(begin)] == begin
    kept_begin = begin[:length] if has_begin else ()
    has_end = token_ids[len(token_ids) - len(end) :] == end
    kept_end = end[: length - len(kept_begin)] if has_end else ()
    inner = token_ids[len(kept_begin) : len(token_ids) - len(kept_end)]
    room = length - len(kept_begin) - len(kept_end)
    kept = inner[len(inner) - room :] if from_left else inner[:room]
    return (*kept_begin, *kept, *kept_end)


def specials_around(
    ids: Sequence[int], bare: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the special tokens before and after a text, by its ids with and without them.

    If the text alone has no ids, half of them count as those before it.
    """
    ids, bare = tuple(ids), tuple(bare)
    if not bare:
        return ids[: len(ids) // 2], ids[len(ids) // 2 :]
    for begin in range(len(ids) - len(bare) + 1):
        if ids[begin : begin + len(bare)] == bare:
            return ids[:begin], ids[begin + len(bare) :]
    return (), ()
