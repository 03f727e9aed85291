from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given as examples
from hypothesis import strategies as st

from mlx_parallm.media.addresses import check_host, is_public, parse_public
from mlx_parallm.types.errors import InvalidRequestError

ANY = ("*",)


@pytest.mark.parametrize(
    "address",
    [
        "8.8.8.8",
        "93.184.216.34",
        "1.1.1.1",
        "2606:4700::1111",
        "::ffff:8.8.8.8",
        "64:ff9b::808:808",
    ],
)
def test_public_addresses(address):
    assert parse_public(address) is not None
    check_host(address, ANY)


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "127.255.255.254",
        "10.0.0.1",
        "172.16.0.1",
        "172.31.255.255",
        "192.168.1.1",
        "169.254.169.254",
        "100.64.0.1",
        "100.100.100.200",
        "0.0.0.0",
        "0.1.2.3",
        "224.0.0.1",
        "239.255.255.255",
        "240.0.0.1",
        "255.255.255.255",
        "192.0.0.192",
        "192.0.2.1",
        "192.88.99.1",
        "198.18.0.1",
        "198.51.100.1",
        "203.0.113.1",
        "168.63.129.16",
        "::",
        "::1",
        "::7f00:1",
        "::ffff:127.0.0.1",
        "::ffff:7f00:1",
        "::ffff:10.0.0.1",
        "::ffff:169.254.169.254",
        "64:ff9b::7f00:1",
        "64:ff9b::a9fe:a9fe",
        "64:ff9b:1::1",
        "2002:7f00:1::",
        "2001::1",
        "2001:db8::1",
        "3fff::1",
        "fc00::1",
        "fd00:ec2::254",
        "fe80::1",
        "fe80::1%eth0",
        "2606:4700::1111%eth0",
        "fec0::1",
        "ff02::1",
        "ff0e::1",
    ],
)
def test_other_addresses_are_refused(address):
    assert parse_public(address) is None
    with pytest.raises(InvalidRequestError, match="no public address"):
        check_host(address, ANY)


@pytest.mark.parametrize(
    "host",
    [
        "2130706433",
        "0x7f000001",
        "0x7f.0.0.1",
        "0177.0.0.1",
        "017700000001",
        "127.1",
        "127.0.1",
        "127.0.0.1.",
        "127.0.0.01",
        "1.2.3.4.5",
        "134744072",
        "010.8.8.8",
        "8.8.8.8.",
        "name.0x7f",
        "::ffff:0x7f.1",
    ],
)
def test_unusual_forms_of_addresses_are_refused(host):
    with pytest.raises(InvalidRequestError, match="no public address"):
        check_host(host, ANY)


@pytest.mark.parametrize(
    "host", ["", ".", "a..b", "a b", "a/b", "a@b", "a%00.b", "ä.test", "a" * 64, "a." * 150]
)
def test_names_that_are_none_are_refused(host):
    with pytest.raises(InvalidRequestError):
        check_host(host, ANY)


@pytest.mark.parametrize("host", ["pictures.test", "Pictures.Test", "pictures.test."])
def test_named_hosts_are_allowed(host):
    check_host(host, ("other.test", "PICTURES.test"))


@pytest.mark.parametrize(
    "host", ["other.test", "sub.pictures.test", "pictures.test.evil.test", "xpictures.test"]
)
def test_other_hosts_are_refused(host):
    with pytest.raises(InvalidRequestError, match="of this host"):
        check_host(host, ("pictures.test",))


def test_no_host_is_allowed_by_default():
    with pytest.raises(InvalidRequestError, match="not fetched by this server"):
        check_host("pictures.test", ())


def test_a_private_address_is_refused_even_if_it_is_named():
    with pytest.raises(InvalidRequestError, match="no public address"):
        check_host("10.0.0.1", ("10.0.0.1",))


@examples(st.integers(0, 2**32 - 1))
def test_mapped_and_translated_addresses_are_as_public_as_the_inner(value):
    inner = ipaddress.IPv4Address(value)
    mapped = ipaddress.IPv6Address(0xFFFF << 32 | value)
    translated = ipaddress.IPv6Address((0x64FF9B << 96) | value)
    assert is_public(mapped) == is_public(translated) == is_public(inner)
    if is_public(inner):
        assert inner.is_global
        assert not inner.is_multicast
