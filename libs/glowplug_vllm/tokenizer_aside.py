"""Read the tokenizer in the API server while the engine core starts; vLLM does one after the other.

vLLM forks the core with the tokenizer read, which it needs for structured output alone: half a second of every
start. Here the core forks earlier, and reads the tokenizer at its first structured answer, or some seconds after its
model was loaded: later its files may be gone from host memory."""

import contextlib
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from glowplug_vllm.replaced import replaced

READ_AFTER_S = 10.0  # after the first answers: reading blocks the core for half a second
_ANSWERED_WITHIN_S = 10.0


class TokenizerRead:
    """One call in a thread. vLLM's client takes it for the renderer, and tells when no fork will follow."""

    def __init__(self, read: Callable[[], Any]) -> None:
        self._read = read
        self._result: Any = None
        self._error: BaseException | None = None
        self._may_begin = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="ReadTokenizer")

    def start_mm_warmup_in_background(self) -> None:
        self._thread.start()

    def core_is_answered(self) -> None:
        """Start parsing, which blocks all answers of this process, only once the core has its own."""
        self._may_begin.set()

    def result(self) -> Any:
        """Raises the call's error."""
        self.core_is_answered()
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._result

    def _run(self) -> None:
        self._may_begin.wait(_ANSWERED_WITHIN_S)
        try:
            self._result = self._read()
        except BaseException as error:  # noqa: BLE001 (raised again where its result is asked for)
            self._error = error


class Later:
    """An attribute that may be set to a partial, which is called at the first read, or after `READ_AFTER_S`."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name
        self._reading = threading.Lock()

    def __set__(self, owner: Any, value: Any) -> None:
        owner.__dict__[self._name] = value
        if isinstance(value, partial):
            timer = threading.Timer(READ_AFTER_S, self._read_by_itself, (owner,))
            timer.daemon = True
            timer.start()

    def _read_by_itself(self, owner: Any) -> None:
        with contextlib.suppress(Exception):
            self.__get__(owner)

    def __get__(self, owner: Any, kind: type | None = None) -> Any:
        if owner is None:
            return self
        try:
            value = owner.__dict__[self._name]
        except KeyError:
            raise AttributeError(self._name) from None
        if isinstance(value, partial):
            with self._reading:
                value = owner.__dict__[self._name]
                if isinstance(value, partial):
                    value = owner.__dict__[self._name] = value()
        return value


def with_one_copy(make_pool: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap vLLM's `maybe_make_thread_pool`: a pool's second copy, a third of the tokenizer's time, is made once two
    threads need it."""
    return lambda tokenizer, copies=1: make_pool(tokenizer, min(copies, 1))


def install() -> None:
    """For a process whose forks are API servers, and theirs engine cores."""
    from vllm.renderers import hf as renderers_hf
    from vllm.v1 import structured_output
    from vllm.v1.engine import async_llm, utils

    llm, manager, read = async_llm.AsyncLLM, structured_output.StructuredOutputManager, async_llm.renderer_from_config
    if hasattr(llm, "glowplug_reads_aside"):
        return
    construct, make_client = llm.__init__, async_llm.EngineCoreClient.make_async_mp_client
    tell = utils.EngineHandshakeMetadata

    def construct_aside(self: Any, *args: Any, **options: Any) -> None:
        names = ("vllm_config", "executor_class", "log_stats")
        config, executor_class, log_stats = (options.get(name) for name in names)
        if args or not (config and executor_class and log_stats) or options.get("client_addresses"):
            construct(self, *args, **options)  # its core was started elsewhere, or is asked for in another way
            return
        async_llm.maybe_register_config_serialize_by_value()
        reading = TokenizerRead(partial(read, config))

        def answer(*given: Any, **fields: Any) -> Any:
            reading.core_is_answered()
            return tell(*given, **fields)

        with replaced(utils, "EngineHandshakeMetadata", answer):
            client = make_client(config, executor_class, log_stats, renderer=reading)
        try:
            renderer = reading.result()
        except BaseException:
            client.shutdown()
            raise

        def made(*_: Any, **__: Any) -> Any:
            renderer.start_mm_warmup_in_background()
            return client

        with (
            replaced(async_llm, "renderer_from_config", lambda *_, **__: renderer),
            replaced(async_llm.EngineCoreClient, "make_async_mp_client", staticmethod(made)),
        ):
            construct(self, **options)

    llm.__init__, llm.glowplug_reads_aside = construct_aside, True
    real = structured_output.cached_tokenizer_from_config
    structured_output.cached_tokenizer_from_config = lambda **given: partial(real, **given)
    renderers_hf.maybe_make_thread_pool = with_one_copy(renderers_hf.maybe_make_thread_pool)
    later = Later()
    later.__set_name__(manager, "tokenizer")
    manager.tokenizer = later
