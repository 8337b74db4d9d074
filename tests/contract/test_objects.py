"""Every object store: in memory, in a folder, and on a real S3 server (moto's, in its own process)."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from glowplug.services.router.batches.objects import NoObject, Objects, ObjectsUnavailable, _bounds
from tests.servers import S3Process
from tests.waiting import WAIT_S


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Process]:
    with S3Process(tmp_path_factory.mktemp("s3")) as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.variables.items():
            patch.setenv(name, value)
        yield server


@pytest.fixture(params=["memory", "file", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "s3":
        request.getfixturevalue("s3")
        return f"s3://files/{tmp_path.name}/below"
    return "memory:///" if request.param == "memory" else (tmp_path / "files").as_uri()


async def whole(objects: Objects, name: str) -> bytes:
    pieces = [piece async for piece in objects.read(name)]
    assert all(0 < len(piece) <= 256 * 1024 for piece in pieces)
    return b"".join(pieces)


async def pieces_of(content: bytes, size: int) -> AsyncIterator[bytes]:
    for start in range(0, len(content), size):
        yield content[start : start + size]


@pytest.mark.parametrize("num_bytes", [0, 1, 12_000_001])  # the last needs more than one part
async def test_an_object_comes_back_as_it_was(url: str, num_bytes: int) -> None:
    objects, content = Objects(url), bytes(range(251)) * (num_bytes // 251) + b"x" * (num_bytes % 251)
    await objects.put("files/bytes", content)
    await objects.put("files/pieces", pieces_of(content, 1 << 20))
    assert await whole(objects, "files/bytes") == await whole(objects, "files/pieces") == content


async def test_the_last_content_of_a_name_counts_and_a_removed_one_is_gone(url: str) -> None:
    objects = Objects(url)
    for content in (b"first", b"second"):
        await objects.put("batches/b/1-0", content)
    await objects.put("batches/b/1-1", b"beside")
    assert await whole(objects, "batches/b/1-0") == b"second"
    for _ in range(2):
        await objects.delete("batches/b/1-0")
    for name in ("batches/b/1-0", "batches/b", "batches/none"):
        with pytest.raises(NoObject):
            await whole(objects, name)
    assert await whole(objects, "batches/b/1-1") == b"beside"


async def test_an_upload_that_breaks_off_leaves_no_object(url: str) -> None:
    async def breaks_off() -> AsyncIterator[bytes]:
        yield b"x" * 6_000_000
        raise OSError("the disk of the router")

    objects = Objects(url)
    with pytest.raises(ObjectsUnavailable):
        await objects.put("files/half", breaks_off())
    with pytest.raises(NoObject):
        await whole(objects, "files/half")


async def test_objects_are_there_for_a_router_that_comes_later(url: str) -> None:
    if url == "memory:///":
        pytest.skip("memory ends with its router")
    await Objects(url).put("files/a", b"kept")
    assert await whole(Objects(url), "files/a") == b"kept"


async def test_a_folder_with_a_space_in_its_name_is_that_folder(tmp_path: Path) -> None:
    for number in range(2):  # it may be there already
        await Objects((tmp_path / "deep" / "a folder").as_uri()).put(f"files/{number}", b"kept")
    folder = tmp_path / "deep" / "a folder"
    assert (folder / "files" / "1").read_bytes() == b"kept" and folder.stat().st_mode & 0o777 == 0o700


async def test_objects_come_in_pieces_of_the_size_asked_for() -> None:
    objects = Objects("memory:///")
    await objects.put("a", b"0123456789")
    assert [piece async for piece in objects.read("a", 4)] == [b"0123", b"4567", b"89"]


async def test_a_store_that_is_none_and_an_object_that_is_gone_have_their_errors(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for url in ((tmp_path / "file").as_uri(), "nothing://x"):
        with pytest.raises(ObjectsUnavailable, match="GLOWPLUG_FILES_URL") as refused:
            await Objects(url).put("a", b"")
        error = refused.value
        assert (error.status, error.code, error.retry_after_s) == (503, "files_unavailable", 2.0)
    with pytest.raises(NoObject) as missing:
        await whole(Objects("memory:///"), "a")
    assert missing.value.status == 404 and "no content" in missing.value.message


def test_a_store_may_be_silent_for_a_while_and_take_a_day_for_a_large_file() -> None:
    bounds = _bounds(20.0)
    client, retry = bounds["client_options"], bounds["retry_config"]
    assert client == {
        "allow_http": True, "connect_timeout": timedelta(seconds=5), "read_timeout": timedelta(seconds=20),
        "timeout": timedelta(days=1),
    }  # fmt: skip
    assert retry == {"max_retries": 3, "retry_timeout": timedelta(seconds=10)}


async def test_a_store_that_does_not_answer_is_given_up(s3: S3Process) -> None:
    objects = Objects("s3://files/stalls", stall_s=0.5)
    await objects.put("files/a", b"kept")
    s3.freeze()
    try:
        async with asyncio.timeout(WAIT_S):
            for call in (objects.put("files/b", b"x"), whole(objects, "files/a"), objects.delete("files/a")):
                with pytest.raises(ObjectsUnavailable, match="GLOWPLUG_FILES_URL") as refused:
                    await call
                assert refused.value.status == 503 and "testing" not in refused.value.message
    finally:
        s3.thaw()
