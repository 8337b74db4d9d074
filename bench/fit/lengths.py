"""Train the predictor of response lengths on conversations, and judge it on others.

    python bench/fit/lengths.py CONVERSATIONS.json --tokenizer tokenizer.json --out length_model.npz
    python bench/fit/lengths.py CONVERSATIONS.json --tokenizer tokenizer.json --judge length_model.npz

CONVERSATIONS.json is an array of {"id", "conversations": [{"from": "human" | "gpt" | "system", "value"}]} (ShareGPT's
form; a file that is cut off is read as far as it goes). Lengths are in tokens of that tokenizer; without one a token is
4.3 characters. A fifth of the conversations, by a hash of their number, is held out from the training and judged; the
file that is written is of the training part alone, so that a later `--judge` says the same.

Needs scikit-learn and, with `--tokenizer`, tokenizers: no service does. About four minutes on one core for 61,000
answers.
"""

import argparse
import hashlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from glowplug.policies.prediction.length_model import VERSION, LengthModel
from glowplug.policies.prediction.length_text import CHARS_PER_TOKEN, NUM_BUCKETS, Turn, describe

BEYOND = (40, 90, 160, 270, 400, 600)  # tokens: a head each
ALPHA, NUM_FOLDS, NUM_PARTS = 0.4, 5, 10  # of the ridge; folds of its own training; parts of which two are held out
TREES = {"loss": "absolute_error", "max_iter": 300, "learning_rate": 0.06, "max_leaf_nodes": 31, "max_depth": 8}
CLIPPED = 0.35  # of the largest weight: few are beyond, and the others get more of the eight bits
LEAST = 50  # answers for a band of their own
EDGES = np.log1p([20.0, 50.0, 100.0, 150.0, 200.0, 270.0, 350.0, 450.0, 600.0])


def conversations(path: Path) -> Iterator[list[dict[str, str]]]:
    """Each as its messages."""
    text, decoder = path.read_text(encoding="utf-8"), json.JSONDecoder()
    at = text.index("[") + 1
    while True:
        while at < len(text) and text[at] in ", \n\r\t":
            at += 1
        try:
            found, at = decoder.raw_decode(text, at)
        except ValueError:
            return
        yield found["conversations"]


class Answers:
    """Every answer to a person's turn: what is said of it, its length, and the part its conversation is in."""

    def __init__(self, path: Path, tokenizer: Path | None) -> None:
        from scipy import sparse

        numbers, words, starts, lengths, parts, later, seconds = [], [], [0], [], [], [], []
        self.described = []
        texts = []
        for number, messages in enumerate(conversations(path)):
            turns = [Turn(m["value"], m["from"] == "gpt") for m in messages]
            part = int(hashlib.md5(str(number).encode()).hexdigest(), 16) % NUM_PARTS
            for at in range(1, len(turns)):
                if messages[at]["from"] != "gpt" or messages[at - 1]["from"] != "human":
                    continue
                began = time.thread_time()
                said = describe(turns[:at])
                seconds.append(time.thread_time() - began)
                numbers.append(said.numbers)
                words.append(np.array(sorted(said.words), dtype=np.int32))
                starts.append(starts[-1] + len(said.words))
                parts.append(part)
                later.append(said.has_answers)
                texts.append(turns[at].text)
                self.described.append(said)
        lengths = num_tokens(texts, tokenizer)
        self.seconds = np.array(seconds)
        self.numbers = np.array(numbers, dtype=np.float32)
        ones = np.ones(starts[-1], dtype=np.float32)
        self.words = sparse.csr_matrix((ones, np.concatenate(words), np.array(starts)), shape=(len(texts), NUM_BUCKETS))
        self.tokens, self.part, self.later = np.array(lengths), np.array(parts), np.array(later)
        self.held_out = self.part >= NUM_PARTS - 2


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


def train(answers: Answers) -> dict[str, Any]:
    """The arrays of a file, from what is not held out."""
    from scipy import sparse
    from sklearn.ensemble import HistGradientBoostingRegressor
    from sklearn.linear_model import Ridge

    def boosted(inputs: Any, logs: Any) -> Any:
        return HistGradientBoostingRegressor(**TREES, min_samples_leaf=40, random_state=1).fit(inputs, logs)

    mine = ~answers.held_out
    logs = np.log1p(answers.tokens)
    wanted = np.stack([logs, *((answers.tokens > limit).astype(float) for limit in BEYOND)], axis=1)
    norm = 1.0 / np.sqrt(np.maximum(1, np.diff(answers.words.indptr)))
    words = sparse.diags(norm).dot(answers.words).tocsr()

    def ridge(rows: Any) -> Any:
        return Ridge(alpha=ALPHA, solver="lsqr", max_iter=60, tol=1e-3).fit(words[rows], wanted[rows])

    heads = np.zeros_like(wanted)
    for fold in range(NUM_FOLDS):  # the trees are to see the heads as they are for texts that they were not fitted to
        rest = mine & (answers.part % NUM_FOLDS != fold)
        one = mine & (answers.part % NUM_FOLDS == fold)
        heads[one] = ridge(rest).predict(words[one])
    whole = ridge(mine)
    weights, bias = whole.coef_.T, whole.intercept_
    scale = np.abs(weights).max(0) / 127 * CLIPPED
    packed = np.clip(np.round(weights / scale), -127, 127).astype(np.int8)
    inputs = np.hstack([answers.numbers, heads])
    found = np.zeros(len(logs))  # of each by trees that were not fitted to it: the bands are made of these
    for fold in range(2):
        one = mine & (answers.part % 2 == fold)
        found[one] = boosted(inputs[mine & ~one], logs[mine & ~one]).predict(inputs[one])
    trees = boosted(inputs[mine], logs[mine])
    parts = {"version": np.int32(VERSION), "weights": packed, "scale": scale.astype(np.float32)}
    parts |= {"bias": bias.astype(np.float32), "edges": EDGES.astype(np.float32)}
    return parts | flat(trees) | bands(answers.tokens[mine], found[mine], answers.later[mine])


def flat(trees: Any) -> dict[str, Any]:
    """All trees in one list of nodes."""
    columns: dict[str, list[Any]] = {name: [] for name in ("feature", "limit", "left", "right", "value")}
    roots, depth, first = [], 0, 0
    for (tree,) in trees._predictors:
        nodes, num = tree.nodes, len(tree.nodes)
        own, leaf = np.arange(num) + first, nodes["is_leaf"].astype(bool)
        columns["feature"].append(np.where(leaf, 0, nodes["feature_idx"]).astype(np.uint8))
        columns["limit"].append(np.where(leaf, 0, nodes["num_threshold"]).astype(np.float32))
        columns["left"].append(np.where(leaf, own, nodes["left"] + first).astype(np.int32))
        columns["right"].append(np.where(leaf, own, nodes["right"] + first).astype(np.int32))
        columns["value"].append(np.where(leaf, nodes["value"], 0.0).astype(np.float32))
        roots.append(first)
        depth, first = max(depth, int(nodes["depth"].max())), first + num
    arrays = {name: np.concatenate(some) for name, some in columns.items()}
    base = np.float32(np.ravel(trees._baseline_prediction)[0])
    return arrays | {"roots": np.array(roots, dtype=np.int32), "base": base, "depth": np.int32(depth)}


def bands(tokens: Any, logs: Any, later: Any) -> dict[str, Any]:
    """Ratios of the actual over the expected length, their 10th and 90th percentile, by what is expected."""
    ratio = tokens / np.maximum(1.0, np.expm1(logs))
    bins, kinds, num = np.searchsorted(EDGES, logs), later.astype(int), len(EDGES) + 1
    low, high = np.ones((2, num), np.float32), np.ones((2, num), np.float32)
    for kind in (0, 1):
        for at in range(num):
            some = ratio[(bins == at) & (kinds == kind)]
            some = some if len(some) >= LEAST else ratio[kinds == kind]
            low[kind, at], high[kind, at] = np.quantile(some, [0.1, 0.9])
    return {"low": low, "high": high}


def judge(model: LengthModel, answers: Answers) -> None:
    """Print how far it is off, on what is held out."""
    rows = np.flatnonzero(answers.held_out)
    seconds, found = [], []
    for row in rows:
        began = time.thread_time()
        found.append(model.expect(answers.described[row]))
        seconds.append(time.thread_time() - began)
    total = (np.array(seconds) + answers.seconds[rows]) * 1e3
    tokens, actual = np.array([one.tokens for one in found]), answers.tokens[rows]
    low, high = np.array([one.low for one in found]), np.array([one.high for one in found])
    constant = float(np.median(answers.tokens[~answers.held_out]))
    print(f"{len(rows)} answers held out, median {np.median(actual):.0f} tokens; {time.strftime('%Y-%m-%d')}")
    print("| | constant | ours | below it | within 25 / 50 / 100 | in the 80 % band |\n|---|---|---|---|---|---|")
    for name, some in (("all", actual > 0), ("first turns", ~answers.later[rows]), ("later", answers.later[rows])):
        error, base = np.abs(tokens - actual)[some], np.abs(constant - actual)[some].mean()
        within = " / ".join(f"{(error <= limit).mean():.0%}" for limit in (25, 50, 100))
        inside = ((actual >= low) & (actual <= high))[some].mean()
        print(f"| {name} | {base:.1f} | {error.mean():.1f} | {1 - error.mean() / base:.1%} | {within} | {inside:.1%} |")
    p50, p99 = np.percentile(total, [50, 99])
    text = np.median(answers.seconds[rows]) * 1e3
    print(f"CPU per answer: p50 {p50:.3f} ms, p99 {p99:.3f} ms, of which the text {text:.3f} at the median")


def main() -> None:
    """Train and write, or judge a file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("conversations", type=Path)
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--judge", type=Path)
    args = parser.parse_args()
    answers = Answers(args.conversations, args.tokenizer)
    if args.judge is None:
        out = args.out or Path("length_model.npz")
        np.savez_compressed(out, **train(answers))
        print(f"{out}: {out.stat().st_size / 1e6:.2f} MB")
        args.judge = out
    judge(LengthModel.read(args.judge), answers)


if __name__ == "__main__":
    main()
