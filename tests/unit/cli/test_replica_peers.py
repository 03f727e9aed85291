"""The settings of servers that change together."""

from __future__ import annotations

from typing import Any

import pytest

from mlx_parallm.cli.configure import SourcedValue, build_config
from mlx_parallm.types.errors import ConfigError


def configured(**values: Any) -> Any:
    sourced = {name.replace("_", "-"): SourcedValue(value, name) for name, value in values.items()}
    return build_config(sourced)[1].peers


PEERS = ["http://10.0.0.1:8000", "http://10.0.0.2:8000"]


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.com"])
def test_a_server_that_others_reach_needs_a_key(host: str) -> None:
    with pytest.raises(ConfigError, match=r"--peers on .* needs --admin-api-key"):
        configured(peers=PEERS, host=host)
    for key in ("api_key", "admin_api_key"):
        assert configured(peers=PEERS, host=host, **{key: ["key"]}) == tuple(PEERS)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_a_server_of_this_machine_needs_none(host: str) -> None:
    assert configured(peers=PEERS, host=host) == tuple(PEERS)
