"""Token counts out of the last bytes of an answer."""

from services.router.wire import count_tokens


def test_usage_wins_over_timings() -> None:
    tail = b'{"timings":{"prompt_n":1,"predicted_n":2},"usage":{"prompt_tokens":24,"completion_tokens":8}}'
    assert count_tokens(tail, 3) == (24, 8, True)


def test_timings_add_what_the_cache_spared() -> None:
    assert count_tokens(b'data: {"timings":{"cache_n":23,"prompt_n":1,"predicted_n":8}}\n\n', 9) == (24, 8, True)


def test_a_null_usage_is_none() -> None:
    assert count_tokens(b'data: {"usage":null,"choices":[]}\n\ndata: [DONE]\n\n', 5) == (0, 5, False)


def test_embeddings_have_no_response_tokens() -> None:
    assert count_tokens(b'"usage": {"prompt_tokens": 5, "total_tokens": 5}}', 0) == (5, 0, True)


def test_responses_api_names() -> None:
    assert count_tokens(b'"usage":{"input_tokens":3,"output_tokens":4}', 0) == (3, 4, True)


def test_a_message_of_anthropics_counts_its_prompt_at_the_beginning_and_its_answer_at_the_end() -> None:
    """What came from a cache is counted beside the rest, and the beginning says an answer of 0 tokens."""
    begin = b'{"message":{"usage":{"cache_read_input_tokens":30,"input_tokens":1,"output_tokens":0}}}'
    end = b'{"type":"message_delta","usage":{"output_tokens":4}}'
    assert count_tokens(begin + end, 9) == (31, 4, True)
    both = b'{"usage":{"input_tokens":31,"cache_read_input_tokens":30,"output_tokens":4}}'
    assert count_tokens(begin + both, 9) == (61, 4, True), "said again at the end, it is counted once"


def test_a_rerank_has_no_response_tokens() -> None:
    assert count_tokens(b'{"usage":{"prompt_tokens":12,"total_tokens":12},"results":[]}', 0) == (12, 0, True)
