"""Reading of ``policy`` in a net's ``config.json``: which outputs make it a policy."""

from __future__ import annotations

import math
from collections.abc import Mapping

from mlx_parallm.models.nets.fields import Fields
from mlx_parallm.models.nets.layer import TensorForm
from mlx_parallm.types.nets import Distribution, PolicySpec

_BY_LOGITS = (Distribution.CATEGORICAL, Distribution.MULTI_CATEGORICAL, Distribution.BERNOULLI)
_GAUSSIANS = (Distribution.GAUSSIAN, Distribution.SQUASHED_GAUSSIAN)


def read_policy(fields: Fields, outputs: Mapping[str, TensorForm]) -> PolicySpec:
    """Return the roles of outputs, whose forms are known.

    Raises:
        ModelLoadError: a field is missing or wrong, or an output does not fit its role.
    """
    distribution = _distribution(fields)
    role = "logits" if distribution in _BY_LOGITS else "mean"
    parameters = fields.text(role)
    size = _num_parameters(fields, role, parameters, outputs)
    policy = PolicySpec(
        distribution=distribution,
        parameters=parameters,
        log_std=fields.text("log_std") if distribution in _GAUSSIANS else None,
        value=fields.text("value") if fields.has("value") else None,
        low=fields.numbers("low") if fields.has("low") else None,
        high=fields.numbers("high") if fields.has("high") else None,
        sizes=fields.sizes("sizes") if distribution is Distribution.MULTI_CATEGORICAL else (),
    )
    fields.end()
    _check_outputs(policy, fields, outputs)
    _check_bounds(policy, fields, size)
    if policy.sizes and sum(policy.sizes) != size:
        fields.refuse(f"sizes add up to {sum(policy.sizes)}, and {parameters!r} has {size} logits")
    return policy


def _distribution(fields: Fields) -> Distribution:
    name = fields.text("distribution")
    try:
        return Distribution(name)
    except ValueError:
        fields.refuse(f"distribution must be one of {', '.join(Distribution)}, not {name!r}")


def _num_parameters(fields: Fields, role: str, name: str, outputs: Mapping[str, TensorForm]) -> int:
    form = _output(fields, role, name, outputs)
    if len(form.sizes) != 1:
        fields.refuse(f"{role}: output {name!r} must have one dimension after the rows")
    return form.sizes[0]


def _output(fields: Fields, role: str, name: str, outputs: Mapping[str, TensorForm]) -> TensorForm:
    form = outputs.get(name)
    if form is None:
        fields.refuse(f"{role} names {name!r}, which is no output")
    if form.is_integer:
        fields.refuse(f"{role}: output {name!r} must have floating point numbers")
    return form


def _check_outputs(policy: PolicySpec, fields: Fields, outputs: Mapping[str, TensorForm]) -> None:
    wanted = outputs[policy.parameters]
    if policy.log_std is not None:
        form = _output(fields, "log_std", policy.log_std, outputs)
        if form.sizes != wanted.sizes:
            fields.refuse(
                f"log_std: output {policy.log_std!r} has sizes {list(form.sizes)}, and the mean"
                f" {list(wanted.sizes)}"
            )
    if policy.value is not None:
        form = _output(fields, "value", policy.value, outputs)
        if form.sizes not in ((), (1,)) or form.has_time != wanted.has_time:
            fields.refuse(f"value: output {policy.value!r} must be one number a row")


def _check_bounds(policy: PolicySpec, fields: Fields, size: int) -> None:
    bounds = [bound for bound in (policy.low, policy.high) if bound is not None]
    if not bounds:
        return
    if policy.distribution in _BY_LOGITS:
        fields.refuse(f"a {policy.distribution} policy has no low and high")
    if len(bounds) != 2 or any(len(bound) != size for bound in bounds):
        fields.refuse(f"low and high must both be there, with {size} numbers each")
    pairs = list(zip(*bounds, strict=True))
    if any(low >= high for low, high in pairs):
        fields.refuse("low must be less than high")
    is_scaled = policy.distribution is not Distribution.GAUSSIAN
    if is_scaled and not all(math.isfinite(bound) for pair in pairs for bound in pair):
        fields.refuse("low and high must be finite: actions are scaled to them")
