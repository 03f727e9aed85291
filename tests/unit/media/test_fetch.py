from __future__ import annotations

import asyncio
import gzip
import logging
import socket
import ssl
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from mlx_parallm.media.fetch import MAX_FETCHES, Fetcher
from mlx_parallm.media.pinned import Resolver
from mlx_parallm.media_limits import MediaLimits
from mlx_parallm.types.errors import InvalidRequestError, OverloadedError
from tests.unit.media.servers import OTHER_PUBLIC, PUBLIC, TLS, Names, Network, Writer, serving

URL = "http://pictures.test/a.png"
# BRIEF: the answer never comes or never ends, so the test does not depend on speed.
BRIEF = 0.05


@pytest.fixture
async def server():
    async with serving() as images:
        yield images


def fetcher_of(server, names=None, network=None, ssl_context=None, **limits):
    limits = MediaLimits(**{"allowed_domains": ("*",), **limits})
    return Fetcher(
        limits,
        resolve=names or Names(),
        network=network or Network(server.port),
        ssl_context=ssl_context,
    )


async def get(fetcher: Fetcher, url: str = URL) -> bytes:
    async with fetcher.fetched(url) as data:
        return data


async def refusal(fetcher: Fetcher, url: str = URL) -> str:
    with pytest.raises(InvalidRequestError) as refused:
        await get(fetcher, url)
    assert fetcher.num_bytes == 0
    return str(refused.value)


async def test_a_file_is_fetched_from_the_address_that_was_checked(server):
    server.add("/a.png?b=%20c", b"data")
    names, network = Names({"pictures.test": [[PUBLIC], ["127.0.0.1"]]}), Network(server.port)
    fetcher = fetcher_of(server, names, network)
    assert await get(fetcher, "http://pictures.test:8080/a.png?b=%20c") == b"data"
    assert names.asked_names == ["pictures.test"]
    assert network.connections == [(PUBLIC, 8080)]
    head = server.requests[0].lower()
    assert "host: pictures.test:8080\r\n" in head
    assert head.count("host:") == 1
    assert "accept-encoding: identity" in head


async def test_a_name_that_changes_is_checked_each_time(server):
    server.add("/a.png", b"data")
    names, network = Names({"pictures.test": [[PUBLIC], ["127.0.0.1"]]}), Network(server.port)
    fetcher = fetcher_of(server, names, network)
    assert await get(fetcher) == b"data"
    assert "no public address" in await refusal(fetcher)
    assert network.connections == [(PUBLIC, 80)]


async def test_a_name_with_one_private_address_is_refused(server):
    network = Network(server.port)
    names = Names({"pictures.test": [[PUBLIC, "10.0.0.1"]]})
    assert "no public address" in await refusal(fetcher_of(server, names, network))
    assert network.connections == []


async def test_the_next_address_is_tried(server):
    server.add("/a.png", b"data")
    network = Network(server.port, silent=[OTHER_PUBLIC])
    names = Names({"pictures.test": [[OTHER_PUBLIC, PUBLIC]]})
    assert await get(fetcher_of(server, names, network)) == b"data"
    assert network.connections == [(OTHER_PUBLIC, 80), (PUBLIC, 80)]


async def test_a_few_addresses_are_tried(server):
    addresses = [f"93.184.216.{number}" for number in range(50)]
    network = Network(server.port, silent=addresses)
    names = Names({"pictures.test": [addresses]})
    assert "cannot be reached" in await refusal(fetcher_of(server, names, network))
    assert len(network.connections) == 4


async def test_a_name_without_addresses_is_refused(server):
    async def unknown(name, port):
        raise OSError("Name or service not known: pictures.test")

    message = await refusal(fetcher_of(server, unknown))
    assert message == "The image could not be fetched: its host cannot be reached."
    assert "cannot be reached" in await refusal(fetcher_of(server, Names({"pictures.test": [[]]})))


@pytest.mark.parametrize(
    "url",
    [
        "",
        "a.png",
        "//pictures.test/a.png",
        "/etc/passwd",
        "ftp://pictures.test/a.png",
        "gopher://pictures.test/a.png",
        "javascript:alert(1)",
        "http:///a.png",
        "http://:80/a.png",
        "http://user@pictures.test/a.png",
        "http://user:secret@pictures.test/a.png",
        "http://@127.0.0.1/",
        "http://pictures.test@127.0.0.1/",
        "http://127.0.0.1/",
        "http://127.0.0.1:8000/",
        "http://127.1/",
        "http://2130706433/",
        "http://0x7f000001/",
        "http://0177.0.0.1/",
        "http://\uff11\uff12\uff17.0.0.1/",
        "http://127\u30020.0.1/",
        "http://0/",
        "http://10.0.0.1/",
        "http://169.254.169.254/latest/meta-data/",
        "http://[::1]/",
        "http://[::]/",
        "http://[::ffff:127.0.0.1]/",
        "http://[::ffff:7f00:1]/",
        "http://[fe80::1%25eth0]/",
        "http://[fe80::1%eth0]/",
        "http://[fd00:ec2::254]/",
        "http://[ff02::1]/",
        "http://[64:ff9b::7f00:1]/",
        "http://224.0.0.1/",
        "http://pictures.test:99999/",
        "http://pictures.test:x/",
        "http://pictu\0res.test/",
        "http://pictures.test\\@127.0.0.1/",
        "http://a b/",
        "http://" + "a" * 300 + "/",
        "http://pictures.test/" + "a" * 10_000,
        "http://\ud800/",
    ],
)
async def test_urls_are_refused_without_a_connection_or_a_question(server, url, caplog):
    caplog.set_level(logging.DEBUG)
    names, network = Names(), Network(server.port)
    message = await refusal(fetcher_of(server, names, network), url)
    assert names.asked_names == []
    assert network.connections == []
    assert "secret" not in message
    assert "secret" not in caplog.text


@pytest.mark.parametrize("name", ["localhost", "localhost.", "metadata.test", "x.localhost"])
async def test_names_of_private_addresses_are_refused_without_a_connection(server, name):
    network = Network(server.port)
    names = Names(
        {
            "localhost": [["127.0.0.1", "::1"]],
            "localhost.": [["127.0.0.1"]],
            "x.localhost": [["::1"]],
            "metadata.test": [["169.254.169.254"]],
        }
    )
    fetcher = fetcher_of(server, names, network)
    assert "no public address" in await refusal(fetcher, f"http://{name}/")
    assert network.connections == []


async def test_only_allowed_hosts_are_asked(server):
    server.add("/a.png", b"data")
    names, network = Names(), Network(server.port)
    fetcher = fetcher_of(server, names, network, allowed_domains=("pictures.test",))
    assert await get(fetcher) == b"data"
    assert "of this host" in await refusal(fetcher, "http://other.test/a.png")
    fetcher = fetcher_of(server, names, network, allowed_domains=())
    assert "not fetched by this server" in await refusal(fetcher)
    assert names.asked_names == ["pictures.test"]


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_redirects_are_followed(server, status):
    server.add("/a.png", status=f"{status} Moved", location="/b/c.png")
    server.add("/b/c.png", status=f"{status} Moved", location="http://other.test:81/d.png")
    server.add("/d.png", b"data")
    names, network = Names({"other.test": [[OTHER_PUBLIC]]}), Network(server.port)
    assert await get(fetcher_of(server, names, network)) == b"data"
    assert network.connections == [(PUBLIC, 80), (PUBLIC, 80), (OTHER_PUBLIC, 81)]


@pytest.mark.parametrize(
    "location",
    [
        "http://127.0.0.1/",
        "//127.0.0.1/",
        "http://[::ffff:127.0.0.1]/",
        "http://2130706433/",
        "http://169.254.169.254/",
        "http://private.test/",
        "http://user:secret@pictures.test/",
        "file:///etc/passwd",
        "ftp://pictures.test/",
        "data:image/png;base64,AAAA",
        "http://[",
        "",
    ],
)
async def test_redirects_are_checked_like_urls(server, location, caplog):
    caplog.set_level(logging.DEBUG)
    server.add("/a.png", status="302 Found", location=location)
    names, network = Names({"private.test": [["192.168.0.1"]]}), Network(server.port)
    message = await refusal(fetcher_of(server, names, network))
    assert network.connections == [(PUBLIC, 80)]
    assert not location or location not in message


async def test_a_redirect_to_a_host_that_is_not_allowed_is_refused(server):
    server.add("/a.png", status="302 Found", location="http://other.test/")
    names, network = Names(), Network(server.port)
    fetcher = fetcher_of(server, names, network, allowed_domains=("pictures.test",))
    assert "of this host" in await refusal(fetcher)
    assert names.asked_names == ["pictures.test"]


async def test_redirects_are_bounded(server):
    server.add("/a.png", status="302 Found", location="/a.png")
    assert "more than 3 times" in await refusal(fetcher_of(server))
    assert len(server.requests) == 4


async def test_errors_of_the_host_are_not_repeated(server):
    for status in ("404 secret", "500 secret", "204 secret", "206 secret", "304 secret"):
        server.add("/a.png", b"secret" if status[0] in "45" else b"", status, x_header="secret")
        message = await refusal(fetcher_of(server))
        assert message == "The image could not be fetched: its host answered with an error."


async def test_an_answer_that_is_not_http_is_refused(server):
    for answer in (
        b"SSH-2.0-secret\r\n",
        b"",
        b"HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\ncontent-length: 5\r\n\r\ndata",
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\ndata",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\ndata\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nz\r\ndata\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"x: " + b"a" * 200_000,
        b"HTTP/1.1 200 OK\r\ncontent-length: " + b"9" * 5000 + b"\r\n\r\ndata",
        b"HTTP/1.1 302 OK\r\nlocation: http://\xff\xfe/\r\n\r\n\0",
    ):
        server.add_raw("/a.png", answer)
        message = await refusal(fetcher_of(server))
        assert message == "The image could not be fetched: its host does not speak HTTP."


async def test_a_body_longer_than_its_length_is_cut(server):
    server.add("/a.png", b"data and more", content_length="4")
    assert await get(fetcher_of(server)) == b"data"


async def test_a_declared_length_over_the_limit_is_refused_before_the_body(server):
    server.add("/a.png", b"", content_length="101")
    assert "larger than 100 bytes" in await refusal(fetcher_of(server, max_bytes=100))


@pytest.mark.parametrize("is_chunked", [True, False])
async def test_an_endless_body_is_cut_off(server, is_chunked):
    async def endless(writer: Writer) -> None:
        encoding = b"transfer-encoding: chunked\r\n" if is_chunked else b""
        writer.write(b"HTTP/1.1 200 OK\r\n" + encoding + b"\r\n")
        while True:
            writer.write(b"400\r\n" + bytes(1024) + b"\r\n" if is_chunked else bytes(1024))
            await writer.drain()

    server.answers["/a.png"] = endless
    assert "larger than" in await refusal(fetcher_of(server, max_bytes=100_000))


async def test_a_body_of_the_largest_size_is_taken(server):
    server.add("/a.png", bytes(100))
    assert await get(fetcher_of(server, max_bytes=100)) == bytes(100)


@pytest.mark.parametrize(
    "beginning",
    [
        b"",
        b"HTTP/1.1 200 OK\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nslow",
        b"HTTP/1.1 100 Continue\r\n\r\n",
    ],
)
async def test_slow_answers_are_cut_off(server, beginning):
    async def slow(writer: Writer) -> None:
        writer.write(beginning)
        await writer.drain()
        await asyncio.Event().wait()

    server.answers["/a.png"] = slow
    fetcher = fetcher_of(server, timeout_s=BRIEF)
    assert await refusal(fetcher) == (
        f"The image could not be fetched: it took more than {BRIEF} s."
    )


async def test_a_trickle_does_not_extend_the_time(server):
    async def trickle(writer: Writer) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(BRIEF / 10)

    server.answers["/a.png"] = trickle
    assert "took more than" in await refusal(fetcher_of(server, timeout_s=BRIEF))


async def test_a_resolver_that_hangs_is_cut_off(server):
    async def hang(name, port):
        await asyncio.Event().wait()
        return []

    assert "took more than" in await refusal(fetcher_of(server, hang, timeout_s=BRIEF))


async def test_names_that_take_long_keep_no_other_work_waiting(monkeypatch):
    may_end = threading.Event()

    def hang(*_: object, **__: object) -> list[object]:
        may_end.wait()
        return []

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    resolver = Resolver()
    with ThreadPoolExecutor(1) as threads:
        asyncio.get_running_loop().set_default_executor(threads)
        lookups = [asyncio.create_task(resolver(f"{number}.test", 80)) for number in range(8)]
        await asyncio.sleep(0)
        assert await asyncio.to_thread(lambda: "other work") == "other work"
        assert not any(lookup.done() for lookup in lookups)
        may_end.set()
        assert await asyncio.gather(*lookups) == [[]] * 8


async def test_addresses_are_those_of_the_system():
    assert set(await Resolver()("localhost", 80)) <= {"127.0.0.1", "::1"}


@pytest.mark.parametrize("encoding", ["gzip", "br", "deflate", "identity, gzip", "GZIP"])
async def test_compressed_answers_are_refused(server, encoding):
    bomb = gzip.compress(bytes(1_000_000))
    server.add("/a.png", bomb, content_encoding=encoding)
    assert "compressed" in await refusal(fetcher_of(server))


async def test_nothing_is_expanded_that_says_no_encoding(server):
    bomb = gzip.compress(bytes(1_000_000))
    server.add("/a.png", bomb, content_encoding="identity")
    assert await get(fetcher_of(server)) == bomb


async def test_cookies_and_proxies_are_not_used(server, monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    server.add("/a.png", status="302 Found", location="/b.png", set_cookie="a=b")
    server.add("/b.png", b"data")
    assert await get(fetcher_of(server)) == b"data"
    assert "cookie" not in server.requests[1].lower()


async def test_bytes_in_use_are_bounded(server):
    server.add("/a.png", bytes(60))
    fetcher = fetcher_of(server, max_bytes=100, max_fetched_bytes=100)
    async with fetcher.fetched(URL):
        assert fetcher.num_bytes == 60
        with pytest.raises(OverloadedError):
            await get(fetcher)
        assert fetcher.num_bytes == 60
    assert len(await get(fetcher)) == 60
    assert fetcher.num_bytes == 0


async def test_slow_fetches_of_one_client_leave_room_for_others(server):
    async def slow(writer: Writer) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\nslow")
        await writer.drain()
        await writer.wait_closed()

    server.answers["/slow.png"] = slow
    server.add("/a.png", b"data")
    fetcher = fetcher_of(server, max_bytes=4, max_fetched_bytes=2 * 4 * MAX_FETCHES)

    async def wait_for_slow() -> None:
        async with fetcher.fetched("http://pictures.test/slow.png", "greedy"):
            pytest.fail("the answer never ends")

    tasks = [asyncio.create_task(wait_for_slow()) for _ in range(MAX_FETCHES)]
    await asyncio.sleep(0)
    async with fetcher.fetched(URL, "other") as data:
        assert data == b"data"
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert fetcher.num_bytes == 0


async def test_a_client_holds_half_of_the_bytes(server):
    server.add("/a.png", bytes(60))
    fetcher = fetcher_of(server, max_bytes=60, max_fetched_bytes=200)
    async with fetcher.fetched(URL, "greedy"):
        with pytest.raises(OverloadedError):
            async with fetcher.fetched(URL, "greedy"):
                pytest.fail("it has its half")
        async with fetcher.fetched(URL, "other"):
            assert fetcher.num_bytes == 120
    assert fetcher.num_bytes == 0


async def test_a_cancelled_fetch_closes_its_connection(server):
    has_begun = asyncio.Event()

    async def slow(writer: Writer) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\nslow")
        await writer.drain()
        has_begun.set()
        await writer.wait_closed()

    server.answers["/a.png"] = slow
    fetcher = fetcher_of(server)
    task = asyncio.create_task(get(fetcher))
    await has_begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert fetcher.num_bytes == 0


def trusting() -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(TLS / "certificate.pem"))


async def test_tls_verifies_the_name_at_the_pinned_address():
    async with serving(tls=True) as server:
        server.add("/a.png", b"data")
        network = Network(server.port)
        fetcher = fetcher_of(server, network=network, ssl_context=trusting())
        assert await get(fetcher, "https://pictures.test/a.png") == b"data"
        assert network.connections == [(PUBLIC, 443)]
        assert "cannot be reached" in await refusal(fetcher, "https://other.test/a.png")
        distrusting = fetcher_of(server, ssl_context=ssl.create_default_context())
        assert "cannot be reached" in await refusal(distrusting, "https://pictures.test/a.png")
    assert len(server.requests) == 1


async def test_what_was_fetched_is_not_logged(server, caplog):
    caplog.set_level(logging.DEBUG)
    server.add("/a.png?token=secret", b"secret-data")
    assert await get(fetcher_of(server), URL + "?token=secret") == b"secret-data"
    assert "secret" not in caplog.text
