"""The settings of KV of other servers."""

from __future__ import annotations

from typing import Any

import pytest

from mlx_parallm.cli.configure import SourcedValue, build_config
from mlx_parallm.types.errors import ConfigError

PEER = "http://10.0.0.2:8000"


def configured(**values: Any) -> Any:
    sourced = {name.replace("_", "-"): SourcedValue(value, name) for name, value in values.items()}
    return build_config(sourced)[0].kv_peers


def test_nothing_is_used_by_default() -> None:
    assert not configured().is_used


@pytest.mark.parametrize(
    ("keys", "wanted"),
    [
        ({}, None),
        ({"api_key": ["key-1"]}, "key-1"),
        ({"api_key": ["key-1"], "admin_api_key": ["key-2", "key-3"]}, "key-2"),
        ({"admin_api_key": ["key-2"], "peer_key": "key-4"}, "key-4"),
    ],
)
def test_peers_are_sent_the_admin_key(keys: dict[str, Any], wanted: str | None) -> None:
    peers = configured(kv_peers=[PEER, "dns://kv:8000"], **keys)
    assert peers.key == wanted
    assert wanted is None or wanted not in repr(peers)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"host": "localhost"},
        {"host": "::1"},
        {"host": "0.0.0.0", "admin_api_key": ["k"]},
        {"data_parallel_size": 2},
        {"host": "0.0.0.0", "api_key": ["k"], "admin_api_key": ["a"]},
    ],
)
def test_kv_is_served_to_admins_and_on_this_machine(values: dict[str, Any]) -> None:
    assert configured(kv_serve=True, **values).is_served


def test_a_server_names_each_of_its_runs() -> None:
    ids = [configured(kv_serve=True).server_id for _ in range(2)]
    assert len(set(ids)) == 2
    assert repr(ids[0]) not in repr(configured(kv_serve=True))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kv_peers": ["10.0.0.2"]}, "--kv-peers: '10.0.0.2' is not the address"),
        ({"kv_peers": [PEER, PEER]}, "comes twice"),
        ({"kv_peers": [f"{PEER}/v1"]}, "is not the address"),
        ({"prefill_peer": "dns://a:1"}, "--prefill-peer: 'dns://a:1' is not the address"),
        ({"kv_across_devices": True}, "needs --kv-peers or --kv-serve"),
        ({"peer_key": "k"}, "--peer-key needs"),
        ({"kv_serve": True, "api_key": ["k"]}, "--kv-serve needs --admin-api-key"),
        ({"kv_serve": True, "host": "0.0.0.0"}, "--kv-serve needs --admin-api-key"),
        ({"kv_serve": True, "host": "10.0.0.2"}, "--kv-serve needs --admin-api-key"),
        ({"kv_serve": True, "enable_prefix_caching": False}, "--kv-serve shares cached prefixes"),
        ({"prefill_peer": PEER, "enable_prefix_caching": False}, "--prefill-peer shares"),
    ],
)
def test_settings_that_do_not_fit_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        configured(**values)
