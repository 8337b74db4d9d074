"""Token counts from an answer's last bytes."""

import pytest

from glowplug.services.router.wire import asking_for_ids, before_failure, count_tokens

BEGIN = b'{"message":{"usage":{"cache_read_input_tokens":30,"input_tokens":1,"output_tokens":0}}}'
BOTH = b'{"timings":{"prompt_n":1,"predicted_n":2},"usage":{"prompt_tokens":24,"completion_tokens":8}}'
COUNTS = {
    "usage wins over timings": (BOTH, 3, (24, 8, True)),
    "timings and what the cache spared": (
        b'data: {"timings":{"cache_n":23,"prompt_n":1,"predicted_n":8}}\n\n',
        9,
        (24, 8, True),
    ),
    "a null usage is none": (b'data: {"usage":null,"choices":[]}\n\ndata: [DONE]\n\n', 5, (0, 5, False)),
    "embeddings": (b'"usage": {"prompt_tokens": 5, "total_tokens": 5}}', 0, (5, 0, True)),
    "a rerank": (b'{"usage":{"prompt_tokens":12,"total_tokens":12},"results":[]}', 0, (12, 0, True)),
    "names of the Responses API": (b'"usage":{"input_tokens":3,"output_tokens":4}', 0, (3, 4, True)),
    "Anthropic: the cache's beside the rest, the answer's at the end": (
        BEGIN + b'{"type":"message_delta","usage":{"output_tokens":4}}',
        9,
        (31, 4, True),
    ),
    "Anthropic: what the end says again is counted once": (
        BEGIN + b'{"usage":{"input_tokens":31,"cache_read_input_tokens":30,"output_tokens":4}}',
        9,
        (61, 4, True),
    ),
}


@pytest.mark.parametrize("what", COUNTS)
def test_tokens_are_counted_by_the_end_of_an_answer(what: str) -> None:
    tail, num_events, counted = COUNTS[what]
    assert count_tokens(tail, num_events) == counted


TOLD = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
DIED = b'data: {"error":{"message":"EngineCore died","code":500}}\n\n'


@pytest.mark.parametrize(
    ("body", "before", "why"),
    [
        (TOLD, TOLD, ""),
        (TOLD + DIED + b"data: [DONE]\n\n", TOLD, "the engine failed: EngineCore died"),
        (DIED.replace(b"500", b"400"), DIED.replace(b"500", b"400"), ""),
        (b"event: error\n" + DIED, b"", "the engine failed: EngineCore died"),
        (b'data: {"choices":[{"finish_reason": "abort"}]}\r\n\r\n', b"", "the engine stopped its answers"),
        (b'data: {"choices":[{"delta":{"content":"abort"},"finish_reason":null}]}\n\n', None, ""),
        (b'data: {"choices":[{"delta":{"content":"say \\"abort\\""}}]}\n\n', None, ""),
        (b'data: {"error":no json\n\n', None, ""),
    ],
)
def test_an_event_in_which_an_engine_says_that_it_has_failed(body: bytes, before: bytes | None, why: str) -> None:
    assert before_failure(body) == (body if before is None else before, why)


def test_a_stream_is_asked_for_its_tokens_once() -> None:
    asked = asking_for_ids(b"/v1/chat/completions", b'{"model":"m","stream":true} \n')
    assert asked == b'{"model":"m","stream":true,"return_token_ids":true}'
    assert asking_for_ids(b"/v1/chat/completions", asked) == asked
    assert asking_for_ids(b"/v1/messages", b"{}") == b"{}"
