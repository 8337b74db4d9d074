"""Workload readers and samplers, and PreServe's length errors."""

import gzip
import math
from collections import Counter
from itertools import islice, pairwise
from pathlib import Path
from random import Random
from statistics import fmean, pstdev

import pytest

from glowplug_lab.simulator.scenario.load import load
from glowplug_lab.simulator.workload.arrival import Arrival, TraceError, merge
from glowplug_lab.simulator.workload.formats import Reading, length_pairs, read
from glowplug_lab.simulator.workload.sampling import (
    Lengths,
    binomial,
    expected_tokens,
    gamma_times,
    lognormal_pairs,
    power_law_shares,
    renewal_times,
    with_errors,
)
from glowplug_lab.simulator.workload.tables import read_once

ONE_LENGTH = Lengths([(100, 20)])


def written(tmp_path, text, name="trace.csv"):
    path = tmp_path / name
    if name.endswith(".gz"):
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


FORMATS = {
    "own": ("t_s,prompt_tokens,response_tokens\n3,10,5\n4.5,20,6\n", [(0.0, "model", 10, 5), (1.5, "model", 20, 6)]),
    "own, several models": (
        "t_s,model,prompt_tokens,response_tokens\n0,a,1,0\n0,b,2,3\n",
        [(0, "a", 1, 1), (0, "b", 2, 3)],
    ),
    "azure llm": (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.0319600,3180,8\n",
        [(0.0, "model", 4808, 10), (0.052, "model", 3180, 8)],
    ),
    "azure llm 2024": (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.009930+00:00,2162,5\n",
        [(0.0, "model", 2162, 5)],
    ),
    "burstgpt": (
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,ChatGPT,472,18,490,Conversation log\n45,ChatGPT,1087,0,1087,Conversation log\n"
        "118,GPT-4,417,276,693,API log\n",
        [(0.0, "ChatGPT", 472, 18), (113.0, "GPT-4", 417, 276)],
    ),
    "mooncake": (
        '{"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1]}\n'
        '{"timestamp": 3000, "input_length": 7, "output_length": 8, "hash_ids": []}\n',
        [(0.0, "model", 6758, 500), (3.0, "model", 7, 8)],
    ),
    "mooncake, flat": ("t_ms,prompt_tokens,response_tokens,hash_ids\n0,6758,500,0 1\n", [(0.0, "model", 6758, 500)]),
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_a_format_is_told_by_its_header(tmp_path, name, packed):
    text, wanted = FORMATS[name]
    path = written(tmp_path, text, "trace.csv.gz" if packed else "trace.csv")
    got = list(read(path, Reading(lengths=ONE_LENGTH)))
    assert [a[1:4] for a in got] == [w[1:4] for w in wanted]
    assert [a.at_s for a in got] == pytest.approx([w[0] for w in wanted])


COUNTED = {  # text -> width of its bins, requests by model and bin
    "t_s,requests\n0,3\n10,0\n20,5\n": (10, {("model", 0): 3, ("model", 2): 5}),
    "t_s,model,requests\n0,a,2\n0,b,1\n60,a,4\n": (60, {("a", 0): 2, ("b", 0): 1, ("a", 1): 4}),
}


@pytest.mark.parametrize("text", COUNTED, ids=["counts", "counts of models"])
def test_counted_rows_become_requests_inside_their_bins(tmp_path, text):
    width_s, wanted = COUNTED[text]
    got = list(read(written(tmp_path, text), Reading(lengths=ONE_LENGTH, chance=Random(1))))
    assert Counter((a.model, int(a.at_s // width_s)) for a in got) == wanted
    assert got == sorted(got, key=lambda a: a.at_s)


BAD = {
    "": "is empty",
    "a,b\n1,2\n": "line 1: header: no known format has the columns a, b",
    "t_s,prompt_tokens,response_tokens\n0,ten,5\n": r"line 2: prompt_tokens: 'ten' is not a whole number",
    "t_s,prompt_tokens,response_tokens\n0,-1,5\n": r"line 2: prompt_tokens: '-1' is not a whole number from 0 up",
    "t_s,prompt_tokens,response_tokens\n0,1\n": "line 2: response_tokens: is missing",
    "t_s,prompt_tokens,response_tokens\nnan,1,1\n": "line 2: t_s: 'nan' is not seconds",
    "t_s,prompt_tokens,response_tokens\n5,1,1\n4,1,1\n": "line 3: t_s: a request at -1 s comes after one at 0 s",
    "t_s,requests\n0,3\n10,-4\n": "line 3: requests: '-4'",
    "t_s,requests\n10,3\n0,4\n": "line 3: t_s: 0 s after 10 s",
    "TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,1\n": "line 2: TIMESTAMP: 'yesterday' is not a time",
    '{"timestamp": 0, "input_length": 1}\n': "line 1: output_length: is missing",
    '{"timestamp": 0,\n': "line 1: is not JSON",
    "t_s,response_tokens\n0,1\n": "line 1: prompt_tokens: is missing among the columns t_s, response_tokens",
    "TIMESTAMP,GeneratedTokens\n": "line 1: ContextTokens: is missing among the columns",
    "Timestamp,Model,Response tokens\n": "line 1: Request tokens: is missing among the columns",
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:01+00:00,1,1\n2024-05-10 00:00:00+00:00,1,1\n": (
        "line 3: TIMESTAMP: a request at -1 s"
    ),
    "".join(f'{{"timestamp": {ms}, "input_length": 1, "output_length": 1}}\n' for ms in (2, 0)): (
        "line 2: timestamp: a request at -0.002 s"
    ),
    '{"timestamp": 0, "input_length": NaN, "output_length": 1}\n': "line 1: input_length: 'NaN' is not a whole number",
    "[" * 100_000: "line 1: header: no known format",
    '{"timestamp": ' + "[" * 100_000: "line 1: is not JSON",
    "t_s,prompt_tokens,response_tokens\n0,1,1,\n1,1,1,7\n": "line 3: has 4 cells for 3 columns",
    "t_s,prompt_tokens,response_tokens\n0,1," + "1" * 200_000 + "\n": "line 2: is not CSV: field larger than",
    "Timestamp,Model,Request tokens,Response tokens\n5,GPT-4,1,nan\n": "line 2: Response tokens: 'nan' is not",
}


@pytest.mark.parametrize("text", BAD, ids=lambda text: repr(text[:30]))
def test_what_is_wrong_is_said_with_file_line_and_field(tmp_path, text):
    with pytest.raises(TraceError, match=BAD[text]) as caught:
        list(read(written(tmp_path, text), Reading(lengths=ONE_LENGTH)))
    assert "trace" in str(caught.value)


def test_files_that_are_not_there_not_gzip_or_not_whole(tmp_path):
    with pytest.raises(TraceError, match="No such file"):
        read(tmp_path / "gone.csv")
    broken = tmp_path / "broken.csv.gz"
    broken.write_bytes(b"not gzip at all")
    with pytest.raises(TraceError, match="cannot be read"):
        read(broken)


@pytest.mark.parametrize("name", FORMATS)
def test_what_other_systems_write_around_a_trace_changes_nothing(tmp_path, name):
    """A byte order mark, CR LF line ends, empty trailing cells, gzip under a plain name."""
    text, wanted = FORMATS[name]
    for number, data in enumerate(
        (
            b"\xef\xbb\xbf" + text.encode(),
            text.replace("\n", "\r\n").encode(),
            text.replace("\n", "\n\n").encode(),
            text.encode() if text.startswith("{") else text.replace("\n", ",\n").encode(),
            gzip.compress(text.encode()),
        )
    ):
        path = tmp_path / f"{number}.csv"
        path.write_bytes(data)
        assert len(list(read(path, Reading(lengths=ONE_LENGTH)))) == len(wanted), number


def test_bytes_that_are_no_text_or_no_gzip_are_named_with_their_line(tmp_path):
    lines = b"t_s,prompt_tokens,response_tokens\n" + b"0,1,1\n" * 5000
    path = tmp_path / "late.csv"
    path.write_bytes(lines + b"\xff,1,1\n")
    with pytest.raises(TraceError, match=r"late.csv, line 5002: is not UTF-8 text"):
        list(read(path))
    chance = Random(3)
    packed = bytearray(gzip.compress("".join(f"{chance.random()},1,1\n" for _ in range(9000)).encode()))
    packed[40:60] = bytes(20)
    (tmp_path / "torn.csv.gz").write_bytes(packed)
    with pytest.raises(TraceError, match=r"torn.csv.gz, line 1: cannot be read: "):
        list(read(tmp_path / "torn.csv.gz"))


def test_a_trace_without_lengths_wants_some(tmp_path):
    with pytest.raises(TraceError, match="no lengths were given"):
        list(read(written(tmp_path, "t_s,requests\n0,3\n10,1\n")))


def test_pairs_of_lengths_with_or_without_times(tmp_path):
    assert length_pairs(written(tmp_path, "prompt_tokens,response_tokens\n3772,54\n0,1\n")) == [(3772, 54), (1, 1)]
    assert length_pairs(written(tmp_path, FORMATS["azure llm"][0])) == [(4808, 10), (3180, 8)]


def test_thinning_keeps_its_share(tmp_path):
    path = written(tmp_path, "t_s,requests\n" + "".join(f"{10 * n},100\n" for n in range(200)))
    num = sum(1 for _ in read(path, Reading(lengths=ONE_LENGTH, keep=0.1, chance=Random(4))))
    assert abs(num - 2000) < 5 * math.sqrt(20000 * 0.1 * 0.9)


@pytest.mark.parametrize(("num", "keep"), [(0, 0.5), (1000, 0.001), (1000, 0.5), (50, 1.0)])
def test_binomial_has_its_mean(num, keep):
    chance = Random(9)
    draws = [binomial(num, keep, chance) for _ in range(3000)]
    assert abs(fmean(draws) - num * keep) <= 5 * math.sqrt(num * keep * (1 - keep) / len(draws)) + 1e-9
    assert max(draws) <= num


def test_power_law_of_the_warmserve_text():
    """WarmServe section 7.1: alpha 0.5 gives 35.9/25.4/20.7/18.0 %, alpha 2 gives 70.2/17.6/7.8/4.4 % (erratum E38)."""
    assert power_law_shares(4, 0.5) == pytest.approx([0.359, 0.254, 0.207, 0.180], abs=6e-4)
    assert power_law_shares(4, 2.0) == pytest.approx([0.702, 0.176, 0.078, 0.044], abs=6e-4)
    with pytest.raises(ValueError, match="0 models"):
        power_law_shares(0, 1.0)


@pytest.mark.parametrize("cv", [0.0, 1.0, 4.0])
def test_gamma_gaps_have_their_rate_and_their_cv(cv):
    times = list(gamma_times(5.0, cv, 8000.0, Random(2)))
    gaps = [b - a for a, b in pairwise(times)]
    assert fmean(gaps) == pytest.approx(0.2, rel=0.1)
    assert pstdev(gaps) / fmean(gaps) == pytest.approx(cv, abs=0.12 * max(cv, 0.1))


@pytest.mark.parametrize("shape", [1e-4, 0.05, 1.0, 4.0])
@pytest.mark.parametrize("dist", ["G", "W"])
def test_a_window_holds_its_count_in_order(dist, shape):
    times = list(renewal_times(25, 600.0, dist, shape, Random(3)))
    assert len(times) == 25 and times == sorted(times) and times[0] >= 0 and times[-1] < 600.0


def test_lengths_are_bounded_as_asked():
    lengths = Lengths([(5000, 1), (10, 9000)], max_prompt=1024, min_response=3, max_total=2048)
    assert lengths.pairs == [(1024, 3), (10, 2038)]


def test_lognormal_lengths_have_their_means():
    pairs = lognormal_pairs(40_000, Random(1), prompt_mean=900, prompt_cv=1.5, response_mean=200, response_cv=0.8)
    assert [fmean(tokens) for tokens in zip(*pairs, strict=True)] == pytest.approx([900, 200], rel=0.05)


def test_streams_are_merged_in_order_of_time_then_of_naming():
    slow, fast = (
        [Arrival(t, name, 1, 1) for t in times] for name, times in (("a", (0.0, 1.0, 2.0)), ("b", (0.0, 7.0)))
    )
    found = [(a.at_s, a.model) for a in merge(slow, fast)]
    assert found == [(0.0, "a"), (0.0, "b"), (1.0, "a"), (2.0, "a"), (7.0, "b")]


def test_a_trace_is_read_once_and_again_when_it_has_changed(tmp_path):
    path, reads = tmp_path / "trace.csv", []

    def read(path, upto):
        reads.append(upto)
        return path.read_text()[:upto]

    path.write_text("first")
    assert [read_once(read, path, 4) for _ in range(3)] == ["firs"] * 3 and reads == [4]
    assert read_once(read, path, 2) == "fi"
    path.write_text("another")
    assert read_once(read, path, 4) == "anot" and reads == [4, 2, 4]
    with pytest.raises(FileNotFoundError):
        read_once(read, tmp_path / "none.csv", 1)


NUM = 40_000


def lengths(kind: str) -> list[int]:
    """Chat responses: many short, some near the maximum."""
    chance = Random(kind)
    if kind == "short":
        return [chance.randint(1, 60) for _ in range(NUM)]
    if kind == "long":
        return [chance.randint(3800, 4096) for _ in range(NUM)]
    return [min(4096, max(1, round(chance.lognormvariate(5.0, 1.1)))) for _ in range(NUM)]


@pytest.mark.parametrize("kind", ["short", "chat", "long"])
def test_the_errors_are_those_of_table_2(kind: str) -> None:
    """MAE 78.25; 56.77, 68.79 and 77.95 % within 25, 50 and 100 tokens, whatever the lengths."""
    errors, expected = [], []
    for at, tokens in enumerate(lengths(kind)):
        expected.append(expected_tokens(tokens, 1, at))
        errors.append(abs(expected[-1] - tokens))
    assert fmean(errors) == pytest.approx(78.25, rel=0.02)
    for within, share in ((25, 0.5677), (50, 0.6879), (100, 0.7795)):
        assert fmean(error <= within for error in errors) == pytest.approx(share, abs=0.008), within
    assert min(expected) >= 1 and max(expected) <= 4096


def test_errors_go_both_ways_where_there_is_room() -> None:
    off = [expected_tokens(2000, "a", at) - 2000 for at in range(NUM)]
    assert fmean(o > 0 for o in off) == pytest.approx(0.5, abs=0.02) and abs(fmean(off)) < 3


def test_a_request_has_one_expectation_and_a_seed_another() -> None:
    first = [expected_tokens(300, 1, f"r-{at}") for at in range(50)]
    assert first == [expected_tokens(300, 1, f"r-{at}") for at in range(50)]
    assert first != [expected_tokens(300, 2, f"r-{at}") for at in range(50)]


def test_what_cannot_be_is_refused() -> None:
    for num in (0, 5000):
        with pytest.raises(ValueError, match=f"true_tokens: {num}"):
            expected_tokens(num, 1, 1)


def test_a_stream_carries_its_expectations() -> None:
    arrivals = [Arrival(float(at), "m", 10, 5 + at) for at in range(200)] + [Arrival(200.0, "m", 1, 9999)]
    found = list(with_errors(arrivals, 3))
    assert [a._replace(expected_tokens=0) for a in found] == arrivals
    assert found[7].expected_tokens == expected_tokens(12, 3, 7)
    assert all(1 <= a.expected_tokens <= 4096 for a in found)


def test_a_scenario_asks_for_them() -> None:
    """workload.length_errors sets the expectation beside the true length."""
    path = Path(__file__).parents[3] / "scenarios" / "preserve.yaml"
    plain, off = (
        list(islice(load(path, [f"workload.length_errors={asked}"]).arrivals(), 300)) for asked in ("false", "true")
    )
    assert [a._replace(expected_tokens=0) for a in off] == plain
    assert 30 < fmean(abs(a.expected_tokens - a.response_tokens) for a in off) < 140
