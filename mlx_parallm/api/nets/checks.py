"""Checks of a request's tensors against the signature of its net."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlx_parallm.api.nets.tensors import cast, check_finite, decoded, described, refused
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.nets import ANY, Distribution, NetSignature, PolicySpec, TensorSpec

# MAX_NAME_CHARS: of a name in a refusal.
MAX_NAME_CHARS = 64
# MAX_TIMES: of one row, which recurrent layers read one after the other.
MAX_TIMES = 4096
# MAX_STEPS: rows of a request multiplied by their times.
MAX_STEPS = 2**16


@dataclass(frozen=True, slots=True)
class Rows:
    """The inputs of a request.

    Attributes:
        arrays: by name, in the signature's dtypes and shapes, perhaps without time.
        num_rows: at least one.
        num_times: of every row; None if the inputs have no time, or leave it out.
    """

    arrays: Mapping[str, np.ndarray]
    num_rows: int
    num_times: int | None = None

    @property
    def lead(self) -> tuple[int, ...]:
        """The dimensions before sizes: rows, and time if there is any."""
        return (self.num_rows,) if self.num_times is None else (self.num_rows, self.num_times)


def checked_inputs(
    signature: NetSignature, values: Mapping[str, Any], field: str, *, max_rows: int
) -> Rows:
    """Return a request's inputs.

    Args:
        signature: of the net.
        values: a value for each input, see ``decoded``.
        field: the field of the body that has them.
        max_rows: most rows of a request.

    Raises:
        InvalidRequestError: an input is missing, unknown, or of another shape or dtype; the inputs
            have different numbers of rows or times, or none, or too many; a number is NaN or
            infinite and the net does not take these.
    """
    specs = signature.inputs
    _check_names(values, specs, field)
    arrays = {spec.name: decoded(values[spec.name], _where(field, spec)) for spec in specs}
    lacks_time = _lacks_time(specs, arrays, field)
    for spec in specs:
        arrays[spec.name] = _checked(
            arrays[spec.name], spec, _where(field, spec), signature, lacks_time=lacks_time
        )
    num_rows = _agreed([len(array) for array in arrays.values()], field, "rows", max_rows)
    times = [arrays[spec.name].shape[1] for spec in specs if spec.has_time and not lacks_time]
    num_times = _agreed(times, field, "times", MAX_TIMES) if times else None
    if num_rows * (num_times or 1) > MAX_STEPS:
        raise InvalidRequestError(
            f"{field} has {num_rows} rows of {num_times} times; at most {MAX_STEPS} steps together "
            "are computed for one request.",
            param=field,
        )
    return Rows(arrays, num_rows, num_times)


def _where(field: str, spec: TensorSpec) -> str:
    return f"{field}.{spec.name}"


def _check_names(values: Mapping[str, Any], specs: Sequence[TensorSpec], field: str) -> None:
    names = {spec.name for spec in specs}
    unknown = sorted(values.keys() - names)
    if not unknown and len(values) == len(names):
        return
    what = (
        f"does not know {unknown[0][:MAX_NAME_CHARS]!r}"
        if unknown
        else (f"lacks {min(names - values.keys())!r}")
    )
    expected = "; ".join(map(described, specs)) or "nothing"
    raise InvalidRequestError(f"{field} {what}; expected {expected}.", param=field)


def _lacks_time(specs: Sequence[TensorSpec], arrays: Mapping[str, np.ndarray], field: str) -> bool:
    """True if every input with time has one dimension less than its signature."""
    lacking = {arrays[spec.name].ndim == len(spec.shape) - 1 for spec in specs if spec.has_time}
    if len(lacking) > 1:
        raise InvalidRequestError(
            f"{field} has time in some inputs and not in others; leave it out everywhere or "
            "nowhere.",
            param=field,
        )
    return lacking == {True}


def _checked(
    array: np.ndarray,
    spec: TensorSpec,
    where: str,
    signature: NetSignature,
    *,
    lacks_time: bool = False,
) -> np.ndarray:
    """Return an array in the dtype of its tensor."""
    shape = spec.shape
    if lacks_time and spec.has_time:
        shape = (shape[0], *shape[2:])
    if not fits(array.shape, shape):
        raise refused(where, f"has the shape {list(array.shape)}; expected {described(spec)}")
    array = cast(array, spec.dtype, where)
    if not signature.allows_non_finite:
        check_finite(array, where)
    _check_choices(array, spec, where)
    return array


def _check_choices(array: np.ndarray, spec: TensorSpec, where: str) -> None:
    """Refuse numbers for which a table has no row, or a new dimension no place."""
    if not spec.choices:
        return
    rows = array.reshape(-1, math.prod(spec.shape[1 + spec.has_time :]))
    for choices in spec.choices:
        part = rows[:, choices.begin : choices.end]
        is_wrong = (part < 0) | (part >= choices.count)
        if is_wrong.any():
            row, place = np.argwhere(is_wrong)[0]
            raise refused(
                where,
                f"has {part[row, place]} as element {choices.begin + place} of a row, which may be "
                f"one of 0 to {choices.count - 1}",
            )


def fits(shape: Sequence[int], wanted: Sequence[int]) -> bool:
    """True if a shape has the sizes of another one, which may be ``ANY``."""
    return len(shape) == len(wanted) and all(
        size in (ANY, have) for have, size in zip(shape, wanted, strict=True)
    )


def _agreed(counts: Collection[int], field: str, what: str, most: int) -> int:
    """Return the number of rows or times of all inputs."""
    count, *others = counts
    if set(others) - {count}:
        listed = ", ".join(map(str, counts))
        raise InvalidRequestError(
            f"{field} has inputs with different numbers of {what}: {listed}.", param=field
        )
    if not 0 < count <= most:
        raise InvalidRequestError(
            f"{field} has {count} {what}; a request has 1 to {most}.", param=field
        )
    return count


def checked_states(
    signature: NetSignature, values: Mapping[str, Any] | None, rows: Rows, field: str
) -> dict[str, np.ndarray] | None:
    """Return the states before the first time; None for zeros.

    Raises:
        InvalidRequestError: a state is missing, unknown, or not as the signature says.
    """
    if not values:
        return None
    _check_names(values, signature.states, field)
    states: dict[str, np.ndarray] = {}
    for spec in signature.states:
        where = _where(field, spec)
        states[spec.name] = _checked(decoded(values[spec.name], where), spec, where, signature)
        if len(states[spec.name]) != rows.num_rows:
            raise refused(where, f"has {len(states[spec.name])} rows; expected {rows.num_rows}")
    return states


def checked_starts(value: Any, rows: Rows, field: str) -> np.ndarray | None:
    """Return where episodes begin, bool ``[rows]`` or ``rows.lead``; None if none begins.

    Raises:
        InvalidRequestError: it has another shape, or values that are not booleans.
    """
    if value is None:
        return None
    array = cast(decoded(value, field), "bool", field)
    if array.shape != (rows.num_rows,):
        _check_shape(array, rows.lead, field)
    return array


def _check_shape(array: np.ndarray, shape: Sequence[int], where: str) -> None:
    if array.shape != tuple(shape):
        raise refused(where, f"has the shape {list(array.shape)}; expected {list(shape)}")


def choice_sizes(signature: NetSignature, policy: PolicySpec) -> tuple[int, ...]:
    """Return the number of choices of each element of an action; none if elements are no choices.

    Those of a Bernoulli action are 0 and 1.
    """
    match policy.distribution:
        case Distribution.CATEGORICAL:
            return (_width(signature, policy),)
        case Distribution.MULTI_CATEGORICAL:
            return policy.sizes
        case Distribution.BERNOULLI:
            return (2,) * _width(signature, policy)
        case _:
            return ()


def _width(signature: NetSignature, policy: PolicySpec) -> int:
    """Return the size of the distribution's first parameter for one row."""
    (spec,) = [spec for spec in signature.outputs if spec.name == policy.parameters]
    return spec.shape[-1]


def checked_mask(
    signature: NetSignature, policy: PolicySpec, value: Any, rows: Rows, field: str
) -> np.ndarray | None:
    """Return the mask of choices, bool ``[*rows.lead, choices]``; None if all are allowed.

    Raises:
        InvalidRequestError: the policy takes none; the mask has another shape, or forbids all
            choices of an element of an action.
    """
    if value is None:
        return None
    if not policy.has_choices:
        raise InvalidRequestError(
            f"{field} is for choices among several, which the actions of a {policy.distribution} "
            "policy are not.",
            param=field,
        )
    sizes = choice_sizes(signature, policy)
    mask = cast(decoded(value, field), "bool", field)
    _check_shape(mask, (*rows.lead, sum(sizes)), field)
    begins = np.cumsum((0, *sizes[:-1]))
    is_possible = np.logical_or.reduceat(mask, begins, axis=-1).all(axis=-1)
    if not is_possible.all():
        row, *time = (int(places[0]) for places in np.nonzero(~is_possible))
        when = f" at time {time[0]}" if time else ""
        raise refused(field, f"forbids every choice of row {row}{when}")
    return mask


def checked_actions(
    signature: NetSignature, policy: PolicySpec, value: Any, rows: Rows, field: str
) -> np.ndarray | None:
    """Return actions to judge, int64 or float32; None to draw.

    Raises:
        InvalidRequestError: the policy has no probabilities; or they are not like an answer's.
    """
    if value is None:
        return None
    if policy.distribution is Distribution.DETERMINISTIC:
        raise InvalidRequestError(
            f"{field} cannot be judged: a deterministic policy has no probabilities.", param=field
        )
    sizes = choice_sizes(signature, policy)
    actions = cast(decoded(value, field), "int64" if sizes else "float32", field)
    is_single = policy.distribution is Distribution.CATEGORICAL
    own = () if is_single else (len(sizes) or _width(signature, policy),)
    _check_shape(actions, (*rows.lead, *own), field)
    check_finite(actions, field)
    if sizes and not ((actions >= 0) & (actions < np.asarray(sizes))).all():
        raise refused(field, f"has a choice beyond the {', '.join(map(str, sizes))} that there are")
    if policy.distribution is Distribution.SQUASHED_GAUSSIAN and np.abs(actions).max() > 1:
        raise refused(field, "has numbers beyond -1 and 1, the bounds before they are scaled")
    return actions
