"""A split GGUF equals the original byte for byte."""

import itertools
import random
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from glowplug.domain.errors import WeightsUnavailable
from glowplug.engines.samples import sample_weights_path
from glowplug.weights.source import SourceChanged, SourceOptions
from glowplug.weights.sources import open_source
from glowplug.weights.split_gguf import NotJoinable, part_names
from tests.hub_server import HubServer
from tests.split_gguf import split, write_split
from tests.waiting import WAIT_S
from tests.weight_servers import WeightServer

NUM_PARTS = 3
OPTIONS = SourceOptions(chunk_bytes=10_000, stall_timeout_s=WAIT_S, connect_timeout_s=WAIT_S)


def _text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def _whole(num_tensors: int = 7, vocabulary: int = 30_000) -> bytes:
    """With a vocabulary beyond the first read of the head."""
    words = b"".join(_text(f"word{number}") for number in range(vocabulary))
    values = _text("general.architecture") + struct.pack("<I", 8) + _text("llama")
    values += _text("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, vocabulary) + words
    infos, data, source = b"", b"", random.Random(5)
    for number in range(num_tensors):
        size = 32 * (number + 3)
        infos += _text(f"blk.{number}.w") + struct.pack("<IQIQ", 1, size // 4, 0, len(data))
        data += source.randbytes(size)
    head = struct.pack("<4sIQQ", b"GGUF", 3, num_tensors, 2) + values + infos
    return head + bytes(-len(head) % 32) + data


WHOLE = _whole()


async def _content(uri: str, options: SourceOptions = OPTIONS, cuts: tuple[int, ...] = ()) -> bytes:
    source = open_source(uri, options)
    try:
        info = await source.probe()
        assert await source.measure() == info and info.ranges and not info.is_directory
        (file,) = info.files
        found, bounds = bytearray(), (0, *cuts, 0)
        for first, last in itertools.pairwise(bounds):
            async for chunk in source.read(file, first, last):
                found += chunk
        assert len(found) == info.num_bytes
        return bytes(found)
    finally:
        await source.close()


@pytest.mark.parametrize("num_parts", [2, 3, 7])
async def test_parts_on_a_disk_are_the_file_they_were_split_from(tmp_path: Path, num_parts: int) -> None:
    first, *_ = write_split(WHOLE, tmp_path, num_parts)
    assert await _content(f"{first}") == WHOLE
    assert await _content(f"file://{first}") == WHOLE


@pytest.mark.long
async def test_a_real_file_of_several_parts_is_whole_again(tmp_path: Path) -> None:
    """About a second: 98 MB twice."""
    sample = sample_weights_path().read_bytes()
    first, *_ = write_split(sample, tmp_path, NUM_PARTS)
    assert await _content(f"{first}", SourceOptions()) == sample


async def test_any_range_is_read_as_of_one_file(tmp_path: Path) -> None:
    first, *_ = write_split(WHOLE, tmp_path, NUM_PARTS)
    source = random.Random(9)
    for _ in range(10):
        cuts = tuple(sorted(source.sample(range(len(WHOLE) - 1200, len(WHOLE)), 4)))
        assert await _content(f"{first}", cuts=cuts) == WHOLE


async def test_parts_of_a_web_server_and_of_the_hub(tmp_path: Path) -> None:
    contents = split(WHOLE, NUM_PARTS)
    files = {f"q4/w-{number + 1:05}-of-00003.gguf": content for number, content in enumerate(contents)}
    with HubServer({"org/split": files}) as hub:
        options = SourceOptions(hf_endpoint=hub.url, hf_cache_dir=tmp_path, hf_offline=False, hf_token="")
        assert await _content("hf:org/split:q4/w-00001-of-00003.gguf", options) == WHOLE
        web = f"{hub.url}/org/split/resolve/main/q4/w-00001-of-00003.gguf"
        assert await _content(web) == WHOLE
        with pytest.raises(WeightsUnavailable, match=r"3 parts; name the first one: hf:org/split:q4/w-00001-of-00003"):
            await open_source("hf:org/split", options).probe()
        with pytest.raises(WeightsUnavailable, match=r"it is part 2 of 3; name the first one, w-00001-of-00003\.gguf"):
            open_source("hf:org/split:q4/w-00002-of-00003.gguf", options)
        del hub.repos["org/split"]["q4/w-00003-of-00003.gguf"]
        with pytest.raises(WeightsUnavailable, match=r"part 3 of 3: .*there is no file") as refused:
            await open_source("hf:org/split:q4/w-00001-of-00003.gguf", options).probe()
        assert refused.value.param == "weights"


async def test_parts_of_a_server_without_ranges_are_refused() -> None:
    with (
        WeightServer(split(WHOLE, 2)[0], ranges=False) as server,
        pytest.raises(WeightsUnavailable, match="its server has no ranges"),
    ):
        await open_source(f"{server.url}/w-00001-of-00002.gguf", OPTIONS).probe()


def _missing(paths: list[Path]) -> None:
    paths[1].unlink()


def _swapped(paths: list[Path]) -> None:
    paths[1].write_bytes(paths[2].read_bytes())


def _of_another(paths: list[Path]) -> None:
    paths[2].write_bytes(split(_whole(num_tensors=9), NUM_PARTS)[2])


def _cut(paths: list[Path]) -> None:
    paths[2].write_bytes(paths[2].read_bytes()[:60])


def _no_gguf(paths: list[Path]) -> None:
    paths[1].write_bytes(b"{}" * 100)


WRONG: dict[str, tuple[Callable[[list[Path]], None], str]] = {
    "missing": (_missing, "part 2 of 3: .*no such file"),
    "swapped": (_swapped, "part 2 of 3 says that it is 3 of 3"),
    "of another model": (_of_another, "the parts hold 8 tensors of 7"),
    "cut short": (_cut, "part 3 of 3 is cut short"),
    "no GGUF": (_no_gguf, "part 2 of 3: not a GGUF file"),
}


@pytest.mark.parametrize("name", WRONG)
async def test_parts_that_make_no_file_are_refused_by_their_number(tmp_path: Path, name: str) -> None:
    spoil, said = WRONG[name]
    paths = write_split(WHOLE, tmp_path, NUM_PARTS)
    spoil(paths)
    with pytest.raises(WeightsUnavailable, match=said) as refused:
        await open_source(f"{paths[0]}", OPTIONS).probe()
    assert refused.value.param == "weights"


async def test_parts_that_change_meanwhile_are_noticed(tmp_path: Path) -> None:
    paths = write_split(WHOLE, tmp_path, NUM_PARTS)
    (before,) = (await open_source(f"{paths[0]}", OPTIONS).probe()).files
    paths[1].write_bytes(bytes(paths[1].read_bytes()))
    with pytest.raises(SourceChanged):
        async for _ in open_source(f"{paths[0]}", OPTIONS).read(before, 0, 10):
            pass


@pytest.mark.parametrize(
    ("uri", "first_and_last"),
    [
        ("a/w-00001-of-00002.gguf", ("a/w-00001-of-00002.gguf", "a/w-00002-of-00002.gguf")),
        (
            "https://h/w-00001-of-00002.gguf?k=1",
            ("https://h/w-00001-of-00002.gguf?k=1", "https://h/w-00002-of-00002.gguf?k=1"),
        ),
        ("s3://b/k/W-00001-of-00002.GGUF", ("s3://b/k/W-00001-of-00002.GGUF", "s3://b/k/W-00002-of-00002.GGUF")),
        ("hf:o/n@v1:w-00001-of-00002.gguf", ("hf:o/n@v1:w-00001-of-00002.gguf", "hf:o/n@v1:w-00002-of-00002.gguf")),
        ("w-00001-of-00001.gguf", ()),
        ("w.gguf", ()),
        ("model-00001-of-00002.safetensors", ()),
    ],
)
def test_the_addresses_of_parts(uri: str, first_and_last: tuple[str, ...]) -> None:
    assert part_names(uri) == first_and_last


@pytest.mark.parametrize(
    "uri", ["w-00002-of-00003.gguf", "w-00000-of-00003.gguf", "w-00001-of-00000.gguf", "w-00001-of-99999.gguf"]
)
def test_addresses_that_no_file_is_split_into(uri: str) -> None:
    with pytest.raises(NotJoinable):
        part_names(uri)
