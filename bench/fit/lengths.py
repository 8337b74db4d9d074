"""Train the predictor of response lengths on conversations, and judge it on others.

    python -m bench.fit.lengths CONVERSATIONS.json --tokenizer tokenizer.json --out length_model.npz
    python -m bench.fit.lengths CONVERSATIONS.json --tokenizer tokenizer.json --judge length_model.npz

CONVERSATIONS.json is an array of {"id", "conversations": [{"from": "human" | "gpt" | "system", "value"}]} (ShareGPT's
form; a file that is cut off is read as far as it goes). Lengths are in tokens of that tokenizer; without one a token is
4.3 characters. A fifth of the conversations, by a hash of `--split` and their id, is held out from training and judged.
The written file is from the training part alone, so that a later `--judge` of that split gives the same result.
ShareGPT's long conversations are cut into pieces, whose ids differ after the last underscore; all pieces are in one
part. `--errors FILE` writes the errors of the judged file, which bench/papers applies to the expected lengths of its
routers.

Training needs lightgbm and scipy, and `--tokenizer` needs tokenizers; no service does. Training on 61,000 answers takes
about a minute of an idle core, and reading them another.
"""

import argparse
import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from glowplug.policies.prediction.length_model import VERSION, LengthModel
from glowplug.policies.prediction.length_text import CHARS_PER_TOKEN, NUM_BUCKETS, Described, Turn, describe

BEYOND = (40, 90, 160, 270, 400, 600)  # tokens; each has a head
ALPHA, NUM_STEPS = 30.0, 40  # of the ridge: its penalty, and steps of its solution
NUM_FOLDS, NUM_PARTS = 4, 10  # folds within training; parts of the conversations, two held out
LEAST_TEXTS = 3  # with a word, for the word to count
TREES = {"objective": "l1", "learning_rate": 0.05, "num_leaves": 31, "max_depth": 8, "min_data_in_leaf": 40}
TREES |= {"bagging_fraction": 0.7, "bagging_freq": 1, "feature_fraction": 0.6, "num_threads": 1, "seed": 1}
NUM_TREES, NUM_PLAIN_TREES = 300, 120  # in the file; over the numbers alone
TOKENS_LEFT = 300.0  # a head's unit
LEAST = 50  # answers for a band of their own
EDGES = np.log1p([20.0, 50.0, 100.0, 150.0, 200.0, 270.0, 350.0, 450.0, 600.0])
SHARES = np.linspace(0.025, 0.975, 20)  # of the errors that --errors writes
LENGTH_EDGES = (0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.4, 2.0, 3.0)  # actual lengths over their median


@dataclass(frozen=True, slots=True)
class Asked:
    """A question with the messages before it, and its answer."""

    turns: Sequence[Turn]
    answer: str
    conversation: str  # its id, the same for all pieces of it

    def held_out(self, split: str) -> bool:
        return part(split, self.conversation) >= NUM_PARTS - 2


@lru_cache(maxsize=1 << 16)
def part(split: str, conversation: str) -> int:
    """One of NUM_PARTS; the last two are held out. `split` names a division into parts."""
    return int(hashlib.md5(f"{split}{conversation}".encode()).hexdigest(), 16) % NUM_PARTS


def conversations(path: Path) -> Iterator[tuple[str, list[dict[str, str]]]]:
    """Yield each piece: the id of its conversation, and its messages."""
    text, decoder = path.read_text(encoding="utf-8"), json.JSONDecoder()
    at = text.index("[") + 1
    while True:
        while at < len(text) and text[at] in ", \n\r\t":
            at += 1
        try:
            found, at = decoder.raw_decode(text, at)
        except ValueError:
            return
        yield found["id"].rpartition("_")[0] or found["id"], found["conversations"]


def asked(path: Path) -> Iterator[Asked]:
    """Yield every turn of a person that has an answer."""
    for conversation, messages in conversations(path):
        turns = [Turn(m["value"], m["from"] == "gpt") for m in messages]
        for at in range(1, len(turns)):
            if messages[at]["from"] == "gpt" and messages[at - 1]["from"] == "human":
                yield Asked(turns[:at], turns[at].text, conversation)


class Answers:
    """The features of every answer, its length, and the part of its conversation."""

    def __init__(self, path: Path, tokenizer: Path | None) -> None:
        texts, later, seconds, numbers = [], [], [], []
        words, around = list[Any](), list[Any]()
        self._conversations: list[str] = []
        for one in asked(path):
            began = time.thread_time()
            said = describe(one.turns)
            seconds.append(time.thread_time() - began)
            texts.append(one.answer)
            self._conversations.append(one.conversation)
            later.append(said.has_answers)
            numbers.append(said.numbers)
            for hashes, found in ((said.words, words), (said.around, around)):
                found.append(np.fromiter(hashes, dtype=np.int32, count=len(hashes)))
        self.seconds, self.later = np.array(seconds), np.array(later)
        self.tokens = np.array(num_tokens(texts, tokenizer))
        self.numbers = np.array(numbers, dtype=np.float32)
        self._hashed = (words, around)
        self.divide("")

    def divide(self, split: str) -> None:
        """Hold out the last parts of this split."""
        self.part = np.array([part(split, conversation) for conversation in self._conversations])
        self.held_out = self.part >= NUM_PARTS - 2

    def described(self, row: int) -> Described:
        words, around = (set(rows[row].tolist()) for rows in self._hashed)
        return Described(self.numbers[row].tolist(), words, around, bool(self.later[row]))

    @cached_property
    def words(self) -> Any:
        """A sparse matrix of all hashes by texts. Only training needs it, and scipy with it."""
        words, around = (averaged(rows) for rows in self._hashed)
        return words + around


def averaged(rows: Sequence[Any]) -> Any:
    """A sparse matrix of words by texts; each text is divided by the root of its number of words."""
    from scipy import sparse

    num = np.array([len(row) for row in rows])
    starts = np.concatenate([[0], np.cumsum(num)])
    weights = np.repeat(1.0 / np.sqrt(np.maximum(1, num)), num).astype(np.float32)
    return sparse.csr_matrix((weights, np.concatenate(rows), starts), shape=(len(rows), NUM_BUCKETS))


def num_tokens(texts: list[str], tokenizer: Path | None) -> list[int]:
    if tokenizer is None:
        return [max(1, round(len(text) / CHARS_PER_TOKEN)) for text in texts]
    from tokenizers import Tokenizer

    made = Tokenizer.from_file(str(tokenizer))
    made.no_truncation()
    made.no_padding()
    found = []
    for first in range(0, len(texts), 2000):
        found += [len(one.ids) for one in made.encode_batch(texts[first : first + 2000], add_special_tokens=False)]
    return found


def ridge(words: Any, wanted: Any) -> tuple[Any, Any]:
    """(weights, bias) of least squares with a penalty on the weights, for all columns of `wanted` at once, by conjugate
    gradients on the normal equations. The bias is the mean."""
    bias = wanted.mean(0)
    left = (words.T @ (wanted - bias)).astype(np.float32)
    weights, along = np.zeros_like(left), left.copy()
    size = (left * left).sum(0)
    for _ in range(NUM_STEPS):
        bent = words.T @ (words @ along) + np.float32(ALPHA) * along
        step = size / np.maximum(1e-12, (along * bent).sum(0))
        weights += step * along
        left -= step * bent
        size, before = (left * left).sum(0), size
        along = left + size / np.maximum(1e-12, before) * along
    return weights, bias


def heads_of(answers: Answers) -> tuple[Any, Any, Any]:
    """(weights, bias, heads) from the texts that are not held out. `heads`: the outputs for each text of heads that
    were not fitted to it, which the trees train on. Heads predict the logarithm of the length, the residuals of trees
    over the numbers alone (in logarithms and in tokens), and whether the length exceeds each of some bounds."""
    mine, logs = ~answers.held_out, np.log1p(answers.tokens)
    plain = unseen(answers, answers.numbers, NUM_PLAIN_TREES)
    left = np.clip((answers.tokens - np.expm1(plain)) / TOKENS_LEFT, -2, 2)
    beyond = [answers.tokens > limit for limit in BEYOND]
    wanted = np.stack([logs, logs - plain, left, *beyond], axis=1).astype(np.float32)
    num_texts = np.bincount(answers.words[mine].indices, minlength=NUM_BUCKETS)
    kept = np.flatnonzero(num_texts >= LEAST_TEXTS)
    # Rare words tell more: each is scaled by its rarity, so that the penalty on its weight is smaller.
    rarity = np.log(mine.sum() / num_texts[kept]).astype(np.float32)
    words = answers.words[:, kept].multiply(rarity).tocsr()
    heads = np.zeros_like(wanted)
    for fold in range(NUM_FOLDS):
        rest, one = mine & (answers.part % NUM_FOLDS != fold), mine & (answers.part % NUM_FOLDS == fold)
        weights, bias = ridge(words[rest], wanted[rest])
        heads[one] = words[one] @ weights + bias
    weights, bias = ridge(words[mine], wanted[mine])
    whole = np.zeros((NUM_BUCKETS, len(bias)), np.float32)
    whole[kept] = rarity[:, None] * weights
    return whole, bias, heads


def boosted(inputs: Any, logs: Any, num_trees: int) -> Any:
    import lightgbm

    return lightgbm.train({**TREES, "verbose": -1}, lightgbm.Dataset(inputs, logs), num_trees)


def unseen(answers: Answers, inputs: Any, num_trees: int) -> Any:
    """log(1 + tokens) of each text that is not held out, by trees that were not fitted to it; 0 for the others."""
    mine, logs = ~answers.held_out, np.log1p(answers.tokens)
    found = np.zeros(len(logs))
    for fold in range(2):
        one = mine & (answers.part % 2 == fold)
        found[one] = boosted(inputs[mine & ~one], logs[mine & ~one], num_trees).predict(inputs[one])
    return found


def train(answers: Answers) -> dict[str, Any]:
    """The arrays of a file, trained on the texts that are not held out."""
    mine = ~answers.held_out
    weights, bias, heads = heads_of(answers)
    scale = np.abs(weights).max(0) / 127
    packed = np.round(weights / scale).astype(np.int8)
    inputs, logs = np.hstack([answers.numbers, heads]), np.log1p(answers.tokens)
    found = unseen(answers, inputs, NUM_TREES)
    parts = {"version": np.int32(VERSION), "weights": packed, "scale": scale.astype(np.float32)}
    parts |= {"bias": bias.astype(np.float32), "edges": EDGES.astype(np.float32)}
    parts |= flat(boosted(inputs[mine], logs[mine], NUM_TREES))
    return parts | bands(answers.tokens[mine], found[mine], answers.later[mine])


def flat(trees: Any) -> dict[str, Any]:
    """Put all trees into one list of nodes; a leaf is its own successor."""
    rows: list[list[float]] = []
    deepest = 0

    def add(node: dict[str, Any], depth: int) -> int:
        nonlocal deepest
        at, deepest = len(rows), max(deepest, depth)
        rows.append([0.0, 0.0, at, at, node.get("leaf_value", 0.0)])
        if "split_feature" in node:
            left = add(node["left_child"], depth + 1)
            rows[at] = [node["split_feature"], node["threshold"], left, add(node["right_child"], depth + 1), 0.0]
        return at

    roots = [add(tree["tree_structure"], 0) for tree in trees.dump_model()["tree_info"]]
    feature, limit, left, right, value = np.array(rows).T
    return {
        "feature": feature.astype(np.uint8),
        "limit": limit.astype(np.float32),
        "left": left.astype(np.int32),
        "right": right.astype(np.int32),
        "value": value.astype(np.float32),
        "roots": np.array(roots, dtype=np.int32),
        "depth": np.int32(deepest),
    }


def bands(tokens: Any, logs: Any, later: Any) -> dict[str, Any]:
    """The 10th and 90th percentile of actual over expected length, by expected length."""
    ratio = tokens / np.maximum(1.0, np.expm1(logs))
    bins, kinds, num = np.searchsorted(EDGES, logs), later.astype(int), len(EDGES) + 1
    low, high = np.ones((2, num), np.float32), np.ones((2, num), np.float32)
    for kind in (0, 1):
        for at in range(num):
            some = ratio[(bins == at) & (kinds == kind)]
            some = some if len(some) >= LEAST else ratio[kinds == kind]
            low[kind, at], high[kind, at] = np.quantile(some, [0.1, 0.9])
    return {"low": low, "high": high}


@dataclass(frozen=True, slots=True)
class Judged:
    """The estimates of a file for the held-out answers, beside their lengths; all in tokens, but `ms` of CPU for
    each."""

    tokens: Any
    low: Any
    high: Any
    actual: Any
    later: Any
    constant: float  # the median of the training's answers
    ms: Any

    def cells(self, some: Any = slice(None)) -> str:
        """The cells of `compared` for the chosen answers, and the share in the band."""
        return f"{compared(self.tokens[some], self.actual[some], self.constant)} | {self.inside(some):.1%}"

    def inside(self, some: Any = slice(None)) -> float:
        """The share in the band."""
        return float(((self.actual >= self.low) & (self.actual <= self.high))[some].mean())


def judge(model: LengthModel, answers: Answers) -> Judged:
    """Judge a model on the held-out answers."""
    rows = np.flatnonzero(answers.held_out)
    seconds, found = [], []
    for row in rows:
        described = answers.described(int(row))
        began = time.thread_time()
        found.append(model.expect(described))
        seconds.append(time.thread_time() - began)
    said = np.array([(one.tokens, one.low, one.high) for one in found]).T
    constant = float(np.median(answers.tokens[~answers.held_out]))
    ms = (np.array(seconds) + answers.seconds[rows]) * 1e3
    tokens, low, high = said
    return Judged(tokens, low, high, answers.tokens[rows], answers.later[rows], constant, ms)


def compared(tokens: Any, actual: Any, constant: float) -> str:
    """Mean absolute errors of the constant and of `tokens`, and shares, as cells of a table."""
    error, base = np.abs(tokens - actual), np.abs(constant - actual).mean()
    within = " / ".join(f"{(error <= limit).mean():.0%}" for limit in (25, 50, 100))
    return f"{base:.1f} | {error.mean():.1f} | {1 - error.mean() / base:.1%} | {within}"


def show(judged: Judged) -> None:
    median = np.median(judged.actual)
    print(f"{len(judged.actual)} answers held out, median {median:.0f} tokens; {time.strftime('%Y-%m-%d')}")
    print("| | constant | ours | below it | within 25 / 50 / 100 | in the 80 % band |\n|---|---|---|---|---|---|")
    for name, some in (("all", slice(None)), ("first turns", ~judged.later), ("later", judged.later)):
        print(f"| {name} | {judged.cells(some)} |")
    p50, p99 = np.percentile(judged.ms, [50, 99])
    print(f"CPU per answer: p50 {p50:.3f} ms, p99 {p99:.3f} ms")


ERRORS = """# How far the length model of bench/fit/lengths.py is off: expected over actual length, on {num} answers of
# ShareGPT that were held out from its training ({by}). Written by that script's --errors; do not edit.
# A row of `ratios` is of actual lengths below the `edge` of its number, the last of all above; lengths are divided by
# their median. In a row stand the quantiles `shares` of the ratio.
median_tokens = {median:.0f}
mean_absolute_error = {error:.1f}
edges = {edges}
shares = {shares}
ratios = [
{rows}
]
"""


def errors(judged: Judged, by: str) -> str:
    """The ratios of expected to actual length, by actual length, as TOML."""
    tokens, actual = judged.tokens, judged.actual
    median = float(np.median(actual))
    bins, ratio = np.searchsorted(LENGTH_EDGES, actual / median, side="right"), tokens / np.maximum(1, actual)
    rows = [np.quantile(ratio[bins == at], SHARES) for at in range(len(LENGTH_EDGES) + 1)]
    shown = "\n".join("  [" + ", ".join(f"{one:.3g}" for one in row) + "]," for row in rows)
    return ERRORS.format(
        num=len(actual),
        by=by,
        median=median,
        error=np.abs(tokens - actual).mean(),
        edges=list(LENGTH_EDGES),
        shares=[round(float(share), 3) for share in SHARES],
        rows=shown,
    )


def main() -> None:
    """Train and write, or judge a file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("conversations", type=Path)
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--split", default="", help="each name holds out other conversations")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--judge", type=Path)
    parser.add_argument("--errors", type=Path)
    args = parser.parse_args()
    answers = Answers(args.conversations, args.tokenizer)
    answers.divide(args.split)
    if args.judge is None:
        out = args.out or Path("length_model.npz")
        np.savez_compressed(out, **train(answers))
        print(f"{out}: {out.stat().st_size / 1e6:.2f} MB")
        args.judge = out
    judged = judge(LengthModel.read(args.judge), answers)
    show(judged)
    if args.errors is not None:
        args.errors.write_text(errors(judged, f"split {args.split!r}"), encoding="utf-8")


if __name__ == "__main__":
    main()
