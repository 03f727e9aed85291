"""/v1/uploads: files in parts by the SDK, their order, digests, limits, and what goes wrong."""

from __future__ import annotations

import hashlib
import io
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import openai
import pytest
from openai.types import Upload
from openai.types.uploads import UploadPart

from mlx_parallm.server_config import ServerConfig
from tests.fake_engine import FakeEngine, serve_fake

UPLOADS = "/v1/uploads"
MAX_FILE, MAX_TOTAL = 100_000, 300_000
CREATED: dict[str, Any] = {
    "filename": "a.jsonl", "purpose": "batch", "bytes": 6, "mime_type": "application/jsonl",
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    config = ServerConfig(
        api_keys=("one", "two"),
        data_dir=str(folder),
        max_file_bytes=MAX_FILE,
        max_files_bytes=MAX_TOTAL,
    )
    with serve_fake(FakeEngine(), config) as url:
        yield url


@pytest.fixture
def client(url: str, folder: Path) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="one", max_retries=0) as client:
        yield client
        for file in client.files.list():
            client.files.delete(file.id)
    assert list(folder.glob("files/*.content")) == []


def post(url: str, path: str, key: str = "one", **more: Any) -> httpx2.Response:
    return httpx2.post(url + UPLOADS + path, headers={"authorization": f"Bearer {key}"}, **more)


def begin(client: openai.OpenAI, size: int = 6, **more: Any) -> Upload:
    body: dict[str, Any] = CREATED | {"bytes": size} | more
    return client.uploads.create(**body)


def add(client: openai.OpenAI, upload: Upload, *contents: bytes) -> list[str]:
    return [client.uploads.parts.create(upload.id, data=content).id for content in contents]


def left(folder: Path) -> int:
    """Return how many unfinished contents there are."""
    return sum(name.startswith("new-") for name in os.listdir(folder / "files"))


def test_parts_become_a_file_in_the_order_of_their_ids(client: openai.OpenAI, folder: Path) -> None:
    upload = Upload.model_validate(begin(client).to_dict())
    assert (upload.object, upload.status, upload.bytes) == ("upload", "pending", 6)
    assert (upload.filename, upload.purpose, upload.file) == ("a.jsonl", "batch", None)
    assert upload.expires_at - upload.created_at == 3600
    part = client.uploads.parts.create(upload.id, data=b"ef")
    UploadPart.model_validate(part.to_dict())
    assert (part.object, part.upload_id) == ("upload.part", upload.id)
    first, unused, second = add(client, upload, b"a", b"never", b"bcd")
    done = client.uploads.complete(
        upload.id, part_ids=[first, second, part.id], md5=hashlib.md5(b"abcdef").hexdigest()
    )
    assert (done.status, done.id) == ("completed", upload.id)
    assert done.file is not None
    assert Upload.model_validate(done.to_dict()).file == done.file
    assert client.files.retrieve(done.file.id) == done.file
    assert (done.file.filename, done.file.bytes, done.file.purpose) == ("a.jsonl", 6, "batch")
    assert done.file.expires_at is not None
    assert client.files.content(done.file.id).read() == b"abcdef"
    assert left(folder) == 0
    # A client whose connection broke asks again.
    again = client.uploads.complete(upload.id, part_ids=[first, second, part.id])
    assert again == done
    for work in (
        lambda: add(client, upload, b"x"),
        lambda: client.uploads.complete(upload.id, part_ids=[unused]),
        lambda: client.uploads.cancel(upload.id),
    ):
        with pytest.raises(openai.ConflictError, match="completed"):
            work()


def test_the_sdk_splits_a_file(client: openai.OpenAI) -> None:
    content = os.urandom(MAX_FILE)
    done = client.uploads.upload_file_chunked(
        file=content,
        filename="b.bin",
        bytes=len(content),
        mime_type="text/plain",
        purpose="user_data",
        part_size=30_000,
    )
    assert done.file is not None
    assert client.files.content(done.file.id).read() == content


async def test_the_asynchronous_client_does_too(url: str, client: openai.OpenAI) -> None:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="one") as other:
        done = await other.uploads.upload_file_chunked(
            file=b"x" * 10, filename="c", bytes=10, mime_type="", purpose="batch", part_size=4
        )
        assert done.file is not None
        assert (await other.files.content(done.file.id)).read() == b"x" * 10


@pytest.mark.parametrize(
    ("order", "md5", "param"),
    [
        ([0, 1, 1], None, "part_ids"),
        ([0, 1], None, "part_ids"),
        ([0, 1, 2, 3], None, "part_ids"),
        ([0, 1, None], None, "part_ids"),
        ([], None, "part_ids"),
        ([2, 1, 0], hashlib.md5(b"abcdef").hexdigest(), "md5"),
    ],
    ids=["twice", "missing", "too many", "unknown", "none", "another order"],
)
def test_wrong_parts_are_refused_and_the_upload_goes_on(
    client: openai.OpenAI, order: list[int | None], md5: str | None, param: str
) -> None:
    upload = begin(client)
    parts = add(client, upload, b"ab", b"cd", b"ef", b"gh")
    names = ["part_none" if place is None else parts[place] for place in order]
    body: dict[str, Any] = {"part_ids": names} | ({} if md5 is None else {"md5": md5})
    with pytest.raises(openai.BadRequestError) as refused:
        client.uploads.complete(upload.id, **body)
    assert refused.value.param == param
    done = client.uploads.complete(upload.id, part_ids=parts[2::-1])
    assert done.file is not None
    assert client.files.content(done.file.id).read() == b"efcdab"


def test_a_cancelled_upload_frees_its_parts(client: openai.OpenAI, folder: Path) -> None:
    upload = begin(client)
    add(client, upload, b"ab", b"cd")
    assert left(folder) == 2
    assert client.uploads.cancel(upload.id).status == "cancelled"
    assert left(folder) == 0
    with pytest.raises(openai.ConflictError, match="cancelled"):
        add(client, upload, b"ef")


def test_others_see_nothing(url: str, client: openai.OpenAI) -> None:
    upload = begin(client)
    (part,) = add(client, upload, b"abcdef")
    for path, more in (
        (f"/{upload.id}/parts", {"files": {"data": ("a", b"x")}}),
        (f"/{upload.id}/complete", {"json": {"part_ids": [part]}}),
        (f"/{upload.id}/cancel", {}),
    ):
        assert post(url, path, "two", **more).status_code == 404
    assert client.uploads.cancel(upload.id).status == "cancelled"
    with pytest.raises(openai.NotFoundError):
        client.uploads.cancel("upload_none")


@pytest.mark.parametrize(
    ("changes", "status", "param"),
    [
        ({"bytes": 2 << 30}, 413, None),
        ({"bytes": MAX_FILE + 1}, 413, None),
        ({"bytes": 0}, 400, "bytes"),
        ({"bytes": "6"}, 400, "bytes"),
        ({"purpose": "fun"}, 400, "purpose"),
        ({"filename": ""}, 400, "filename"),
        ({"expires_after": {"anchor": "created_at", "seconds": 1}}, 400, "expires_after"),
    ],
)
def test_a_bad_upload_is_refused_at_once(
    url: str, changes: dict[str, Any], status: int, param: str | None
) -> None:
    answer = post(url, "", json=CREATED | changes)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), answer.text


def test_a_part_that_is_too_large_is_refused_before_it_is_read(
    url: str, client: openai.OpenAI, folder: Path
) -> None:
    upload = begin(client)
    address = urlsplit(url)
    assert address.hostname
    assert address.port
    with socket.create_connection((address.hostname, address.port)) as connection:
        connection.sendall(
            f"POST {UPLOADS}/{upload.id}/parts HTTP/1.1\r\nhost: localhost\r\n"
            "authorization: Bearer one\r\ncontent-type: multipart/form-data; boundary=x\r\n"
            f"content-length: {2 << 30}\r\n\r\n".encode()
        )
        assert b" 413 " in connection.recv(65536).partition(b"\r\n")[0]
    assert left(folder) == 0
    add(client, upload, b"x" * (MAX_FILE - 10))
    # Together they may have as much as a file.
    with pytest.raises(openai.APIStatusError) as refused:
        add(client, upload, b"x" * 11)
    assert refused.value.status_code == 413
    assert left(folder) == 1
    client.uploads.cancel(upload.id)


def test_a_broken_part_leaves_nothing(url: str, client: openai.OpenAI, folder: Path) -> None:
    upload = begin(client)
    for more in (
        {"json": {}},
        {"files": {"other": ("a", b"x")}},
        {"content": b"--x\r\n", "headers": {"content-type": "multipart/form-data; boundary=x"}},
    ):
        headers = {"authorization": "Bearer one"} | more.pop("headers", {})  # type: ignore[operator]
        path = f"{url}{UPLOADS}/{upload.id}/parts"
        assert httpx2.post(path, headers=headers, **more).status_code == 400  # type: ignore[arg-type]
    assert left(folder) == 0
    client.uploads.cancel(upload.id)


def test_parts_count_with_all_files(client: openai.OpenAI, folder: Path) -> None:
    large = [begin(client, MAX_FILE) for _ in range(3)]
    for upload in large[:2]:
        add(client, upload, b"x" * MAX_FILE)
    client.files.create(file=("d", io.BytesIO(b"x" * 50_000)), purpose="user_data")
    with pytest.raises(openai.APIStatusError, match="All files together"):
        add(client, large[2], b"x" * 60_000)
    assert left(folder) == 2
    for upload in large:
        client.uploads.cancel(upload.id)
    client.files.create(file=("d", io.BytesIO(b"x" * MAX_FILE)), purpose="user_data")
