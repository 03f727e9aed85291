"""Rank 0 offers the addresses that an operator or a launcher named, else its own."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from mlx_parallm.distributed.addresses import LOOPBACK, Offer, find_addresses, host_of, listen
from mlx_parallm.types.errors import ConfigError


def test_an_operators_address_is_the_only_one(tmp_path: Path) -> None:
    (tmp_path / "hosts.json").write_text(json.dumps([["10.0.0.1:5000"]]))
    environment = {"MLX_HOSTFILE": str(tmp_path / "hosts.json")}
    assert find_addresses("10.9.9.9", environment) == Offer(("10.9.9.9",), is_explicit=True)


def test_launchers_say_where_rank_0_is(tmp_path: Path) -> None:
    ring = [["10.0.0.1:5000", "10.0.1.1:5001", "10.0.0.1:5002"], ["10.0.0.2:5000"]]
    (tmp_path / "hosts.json").write_text(json.dumps(ring))
    environment = {"MLX_HOSTFILE": str(tmp_path / "hosts.json"), "NCCL_HOST_IP": "10.0.3.1"}
    assert find_addresses(None, environment).hosts == ("10.0.0.1", "10.0.1.1", "10.0.3.1")
    jaccl = {"MLX_JACCL_COORDINATOR": "10.0.0.7:32323"}
    assert find_addresses(None, jaccl).hosts == ("10.0.0.7",)


@pytest.mark.parametrize("text", ["", "[]", "{}", "7", '[{"ssh": "mac1"}]'])
def test_a_hostfile_of_another_form_is_passed_over(tmp_path: Path, text: str) -> None:
    (tmp_path / "hosts.json").write_text(text)
    environment = {"MLX_HOSTFILE": str(tmp_path / "hosts.json")}
    assert LOOPBACK in find_addresses(None, environment).hosts


def test_without_a_launcher_this_machine_is_offered() -> None:
    offer = find_addresses(None, {})
    assert offer.hosts[-1] == LOOPBACK
    assert not offer.is_explicit


@pytest.mark.parametrize(
    ("address", "host"),
    [
        ("10.0.0.1:5000", "10.0.0.1"),
        ("mac1", "mac1"),
        ("mac1:80", "mac1"),
        ("[fe80::1]:5000", "fe80::1"),
        ("[::1]", "::1"),
    ],
)
def test_hosts_of_addresses(address: str, host: str) -> None:
    assert host_of(address) == host


def test_a_port_that_is_taken_is_named() -> None:
    with listen(Offer((LOOPBACK,), is_explicit=True)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen .* 127.0.0.1, port {port}"):
            listen(Offer((LOOPBACK,), is_explicit=True), port)


def test_an_operators_address_must_be_of_this_machine() -> None:
    # 203.0.113.0/24 is for documentation: no machine has such an address.
    with pytest.raises(ConfigError, match=r"cannot listen .* 203\.0\.113\.1, port any"):
        listen(Offer(("203.0.113.1",), is_explicit=True))


def test_an_address_that_others_know_is_listened_to_on_all_interfaces() -> None:
    with listen(Offer(("203.0.113.1",))) as listener:
        address = (LOOPBACK, listener.getsockname()[1])
        with socket.create_connection(address):
            listener.accept()[0].close()
