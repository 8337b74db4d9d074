"""PreServe's own predictor of response lengths (section 4.2), trained and judged beside the one that is shipped.

    python -m bench.fit.prompt_tuning CONVERSATIONS.json --encoder FOLDER [--samples 4000] [--judge 1000]

FOLDER holds a BERT-like encoder as Hugging Face stores it (config.json, model.safetensors, tokenizer.json). As in the
paper learnable prompt tokens go in with the text, the encoder is frozen but for its last layer, [CLS] goes through two
dense layers, and the training answers are put into even buckets of length of which each is filled up to a quarter of
the fullest with perturbed copies. It reads the text to be answered alone, and runs on the CPU, one thread, in bfloat16
while it trains.

Departures: the paper's encoder is DistilBERT, any of its kind may be given here. Prompt tokens stand behind [CLS] and
not at the end, so that padding does not move them. Where the paper replaces 15 % of the words of a copy by synonyms
they become [MASK]. The loss is the absolute error; the paper says "regression". Number of prompt tokens, of buckets,
rates and epochs are not printed.

Conversations are split as bench/fit/lengths.py does, whose file is judged on the same answers. Needs torch,
transformers, and what that script needs.
"""

import argparse
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from transformers import AutoModel, AutoTokenizer

from bench.fit.lengths import Asked, asked, compared, num_tokens
from glowplug.policies.prediction.length_model import SHIPPED, LengthModel
from glowplug.policies.prediction.length_text import Turn, describe

NUM_PROMPTS, WIDTH = 16, 128  # learnable tokens; of the dense layer between [CLS] and the length
NUM_BUCKETS, LONGEST, FILLED, MASKED = 10, 2000, 0.25, 0.15  # of length, evenly up to LONGEST tokens
BATCH, RATE, LAST_RATE = 32, 2e-3, 2e-4  # of prompts and dense layers, and of the encoder's last layer
CHARS = 4000  # of a text that the tokenizer is given


class PromptTuned(torch.nn.Module):
    """The encoder with prompt tokens and a head. Lengths are in units of `unit` tokens inside."""

    def __init__(self, folder: Path, unit: float, num_tokens: int) -> None:
        super().__init__()
        self.tokenizer, self.unit, self.num_tokens = AutoTokenizer.from_pretrained(folder), unit, num_tokens
        self.encoder = AutoModel.from_pretrained(folder)
        self.encoder.requires_grad_(False)
        stack = getattr(self.encoder, "encoder", None) or self.encoder.transformer  # of BERT, of DistilBERT
        self.last = stack.layer[-1]
        self.last.requires_grad_(True)
        width = self.encoder.config.hidden_size
        self.prompts = torch.nn.Parameter(torch.randn(NUM_PROMPTS, width) * 0.02)
        self.head = torch.nn.Sequential(torch.nn.Linear(width, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, 1))
        torch.nn.init.constant_(self.head[-1].bias, 1.0)  # the median, before anything is learned

    def forward(self, ids: Any, mask: Any) -> Any:
        """Lengths in units, of a batch of texts as token ids."""
        texts = self.encoder.get_input_embeddings()(ids)
        prompts = self.prompts.expand(len(ids), -1, -1)
        shown = torch.cat([texts[:, :1], prompts, texts[:, 1:]], dim=1)
        seen = torch.cat([mask[:, :1], mask.new_ones(len(ids), NUM_PROMPTS), mask[:, 1:]], dim=1)
        return self.head(self.encoder(inputs_embeds=shown, attention_mask=seen).last_hidden_state[:, 0]).squeeze(-1)

    def ids_of(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each, cut to `num_tokens`."""
        cut = [text[:CHARS] for text in texts]
        found: list[list[int]] = self.tokenizer(cut, truncation=True, max_length=self.num_tokens)["input_ids"]
        return found

    def padded(self, rows: Sequence[Sequence[int]]) -> tuple[Any, Any]:
        longest = max(map(len, rows))
        pad = self.tokenizer.pad_token_id
        ids = torch.tensor([[*row, *[pad] * (longest - len(row))] for row in rows])
        return ids, torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])

    @torch.inference_mode()
    def expect(self, turns: Sequence[Turn]) -> int:
        """Tokens of the answer to the last turn; the others are not read."""
        units = float(self(*self.padded(self.ids_of([turns[-1].text]))))
        return max(1, round(units * self.unit))


def filled(rows: list[list[int]], tokens: Any, mask_id: int, chance: Random) -> Iterator[tuple[list[int], float]]:
    """All rows, and copies of those whose bucket of length has few."""
    buckets: dict[int, list[int]] = {}
    for at, length in enumerate(tokens):
        yield rows[at], float(length)
        buckets.setdefault(min(NUM_BUCKETS - 1, int(length * NUM_BUCKETS / LONGEST)), []).append(at)
    enough = round(FILLED * max(map(len, buckets.values())))
    for some in buckets.values():
        for _ in range(enough - len(some)):
            at = chance.choice(some)
            inner = [mask_id if chance.random() < MASKED else word for word in rows[at][1:-1]]
            yield [rows[at][0], *inner, rows[at][-1]], float(tokens[at])


def train(model: PromptTuned, chosen: Sequence[Asked], tokens: Any, epochs: int, *, fill: bool) -> None:
    """Prompt tokens, head and last layer."""
    chance = Random(1)
    rows = model.ids_of([one.turns[-1].text for one in chosen])
    pairs = list(zip(rows, map(float, tokens), strict=True))
    if fill:
        pairs = list(filled(rows, tokens, model.tokenizer.mask_token_id, chance))
    groups = [
        {"params": [model.prompts, *model.head.parameters()], "lr": RATE},
        {"params": list(model.last.parameters()), "lr": LAST_RATE},
    ]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.01)
    steps = epochs * -(-len(pairs) // BATCH)
    pace = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda at: min(1.0, (at + 1) / 20) * max(0.0, 1 - at / steps))
    began = time.process_time()
    for epoch in range(epochs):
        total = 0.0
        for batch in batches(pairs, chance):
            lengths = torch.tensor([length for _, length in batch]) / model.unit
            with torch.autocast("cpu", dtype=torch.bfloat16):
                found = model(*model.padded([row for row, _ in batch]))
            loss = (found.float() - lengths).abs().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            pace.step()
            total += loss.item() * len(batch)
        off, seconds = total / len(pairs) * model.unit, time.process_time() - began
        print(f"epoch {epoch + 1}: {len(pairs)} texts, off by {off:.1f} tokens, {seconds:.0f} s of CPU", flush=True)


def batches(pairs: Sequence[tuple[list[int], float]], chance: Random) -> list[list[tuple[list[int], float]]]:
    """Texts about as long together, in any order."""
    order = sorted(pairs, key=lambda pair: (len(pair[0]), chance.random()))
    found = [order[at : at + BATCH] for at in range(0, len(order), BATCH)]
    chance.shuffle(found)
    return found


def judge(model: PromptTuned, shipped: LengthModel, chosen: Sequence[Asked], tokens: Any, constant: float) -> None:
    """Print both beside the constant, on the same answers, and what each takes."""
    ways = {
        "shipped, with the conversation": lambda turns: shipped.expect(describe(turns)).tokens,
        "shipped, the last turn alone": lambda turns: shipped.expect(describe(turns[-1:])).tokens,
        "PreServe's, the last turn alone": model.expect,
    }
    is_first = np.array([not any(turn.answers for turn in one.turns) for one in chosen])
    print(f"{len(chosen)} answers held out, {is_first.sum()} of first turns; {time.strftime('%Y-%m-%d')}")
    print("| | constant | mean absolute error | below it | within 25 / 50 / 100 | first turns | CPU p50 / p99 ms |")
    print("|---|---|---|---|---|---|---|")
    for name, way in ways.items():
        found, seconds = [], []
        for one in chosen:
            began = time.thread_time()
            found.append(way(one.turns))
            seconds.append(time.thread_time() - began)
        expected = np.array(found)
        p50, p99 = np.percentile(np.array(seconds) * 1e3, [50, 99])
        first = compared(expected[is_first], tokens[is_first], constant).split(" | ")[2]
        print(f"| {name} | {compared(expected, tokens, constant)} | {first} | {p50:.2f} / {p99:.2f} |", flush=True)


def main() -> None:
    """Train on a part of what is not held out, and judge on a part of what is."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("conversations", type=Path)
    parser.add_argument("--encoder", type=Path, required=True)
    parser.add_argument("--split", default="", help="as of bench/fit/lengths.py")
    parser.add_argument("--samples", type=int, default=4000, help="answers to train on, before copies; 0: all")
    parser.add_argument("--judge", type=int, default=1000, help="answers to judge by; 0: all")
    parser.add_argument("--tokens", type=int, default=128, help="of a text that are read")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--no-copies", action="store_true", help="buckets of length stay as they are")
    parser.add_argument("--model", type=Path, default=SHIPPED, help="what stands beside it")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    parts: dict[bool, list[Asked]] = {False: [], True: []}
    for one in asked(args.conversations):
        parts[one.held_out(args.split)].append(one)
    for held_out, num in ((False, args.samples), (True, args.judge)):
        Random(2).shuffle(parts[held_out])
        parts[held_out] = parts[held_out][: num or None]
    tokenizer = args.encoder / "tokenizer.json"
    tokens = {which: np.array(num_tokens([one.answer for one in some], tokenizer)) for which, some in parts.items()}
    constant = float(np.median(tokens[False]))
    model = PromptTuned(args.encoder, constant, args.tokens)
    train(model, parts[False], tokens[False], args.epochs, fill=not args.no_copies)
    model.eval()
    judge(model, LengthModel.read(args.model), parts[True], tokens[True], constant)


if __name__ == "__main__":
    main()
