"""Which proposals stand, once the sampler has chosen for every row.

Each row chooses by its own key (seed, position), whatever was proposed; a proposal stands if it is
the choice of the row before it. For a proposal x that is certain this is rejection sampling: x is
accepted with p(x), and what is chosen otherwise has the distribution p without x, renormalised. For
one that a draft model drew with the same key it is the Gumbel coupling of the two distributions
(Daliri, Musco and Suresh, arXiv:2408.07978). Either way a sequence gets the very tokens it would
get without proposals.
"""

from __future__ import annotations

from collections.abc import Sequence

from mlx_parallm.types.step import SampledToken


def count_accepted(chosen: Sequence[int], proposals: Sequence[int]) -> int:
    """How many proposals, from the first on, equal what was chosen in their place.

    ``chosen[i]`` follows the first i proposals.
    """
    for count, (token, proposal) in enumerate(zip(chosen, proposals, strict=False)):
        if token != proposal:
            return count
    return len(proposals)


def keep_valid(
    tokens: Sequence[SampledToken], proposals: Sequence[Sequence[int]]
) -> tuple[SampledToken, ...]:
    """Leave out what was chosen after a proposal that does not stand.

    Args:
        tokens: of each sequence, one for its last token and one for each of its proposals.
        proposals: by sequence.
    """
    kept: list[SampledToken] = []
    first = 0
    for mine in proposals:
        end = first + 1 + len(mine)
        chosen = [token.token_id for token in tokens[first:end]]
        kept += tokens[first : first + 1 + count_accepted(chosen, mine)]
        first = end
    return tuple(kept)
