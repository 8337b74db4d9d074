"""A tokenizer read in a thread, or at first use. Lane: fast, no vLLM."""

import threading
from functools import partial

import pytest

from glowplug_vllm import tokenizer_aside
from glowplug_vllm.replaced import replaced
from glowplug_vllm.tokenizer_aside import Later, TokenizerRead, with_one_copy


def test_what_is_read_waits_until_the_core_has_its_answer() -> None:
    began = threading.Event()
    reading = TokenizerRead(lambda: began.set() or "tokenizer")
    reading.start_mm_warmup_in_background()
    assert not began.wait(0.05), "a thread that parses holds the interpreter, and the core waits for an answer"
    reading.core_is_answered()
    assert began.wait(5.0)
    assert reading.result() == reading.result() == "tokenizer"


def test_what_fails_in_the_thread_is_raised_to_who_asks() -> None:
    def broken() -> str:
        raise OSError("tokenizer.json is no tokenizer")

    reading = TokenizerRead(broken)
    reading.start_mm_warmup_in_background()
    with pytest.raises(OSError, match="is no tokenizer"):
        reading.result()


class Client:
    @staticmethod
    def make(name: str) -> str:
        return name


def test_a_static_method_that_was_replaced_is_one_again() -> None:
    with replaced(Client, "make", staticmethod(lambda name: name * 2)):
        assert Client().make("a") == "aa"
    assert Client().make("a") == "a"


class Manager:
    tokenizer = Later()


def test_an_attribute_is_made_once_when_it_is_first_read() -> None:
    made: list[str] = []
    manager = Manager()
    assert not hasattr(manager, "tokenizer"), "as where vLLM skips it"
    manager.tokenizer = partial(lambda name: made.append(name) or name, "smol")
    assert not made
    assert (manager.tokenizer, manager.tokenizer, made) == ("smol", "smol", ["smol"])
    manager.tokenizer = "another"
    assert manager.tokenizer == "another"


def test_it_is_made_after_a_while_though_nobody_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_aside, "READ_AFTER_S", 0.01)
    began, may_end = threading.Event(), threading.Event()
    made: list[str] = []

    def read() -> str:
        began.set()
        may_end.wait(5.0)
        made.append("smol")
        return "smol"

    manager = Manager()
    manager.tokenizer = partial(read)
    assert began.wait(5.0)
    threading.Timer(0.01, may_end.set).start()
    assert (manager.tokenizer, made) == ("smol", ["smol"]), "read once, though asked for meanwhile"


def test_a_pool_of_tokenizers_begins_with_one_copy() -> None:
    make = with_one_copy(lambda tokenizer, copies: (tokenizer, copies))
    assert [make("smol", 4), make("smol"), make("smol", 0)] == [("smol", 1), ("smol", 1), ("smol", 0)]
