"""Fit the workload generator to the public traces and write its constants.

    python bench/fit/generator.py > libs/glowplug/simulator/workload/generator_fitted.toml

Reads GLOWPLUG_DATA (default ../shared/data), needs numpy (the `dev` extra). Deterministic: the same files give the same
constants.
"""

import csv
import gzip
import math
import os
import sys
from collections import defaultdict
from pathlib import Path
from statistics import NormalDist

import numpy as np

DATA = Path(os.environ.get("GLOWPLUG_DATA", "../shared/data"))
WINDOW_S, HOUR_BINS, TEN_MIN_BINS = 600, 360, 60
FIRST_WEEKDAY = {"conv": 6, "code": 4}  # Monday is 0: the files begin on a Sunday and on a Friday
NUM_PARTS = 6  # of a mixture of lengths


def rows(name: str) -> list[dict[str, str]]:
    with gzip.open(DATA / name, "rt", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def profile(kind: str) -> dict[str, object]:
    """Hours of a weekday and of a weekend day over the mean weekday rate, and how the rate strays from it."""
    counts = np.array([int(r["requests"]) for r in rows(f"azure_2024_{kind}_10s.csv.gz")], float)
    hours = counts.reshape(-1, HOUR_BINS).sum(1).reshape(-1, 24)
    days = np.array([(FIRST_WEEKDAY[kind] + d) % 7 for d in range(len(hours))])
    work, rest = hours[days < 5].mean(0), hours[days >= 5].mean(0)
    windows = counts.reshape(-1, TEN_MIN_BINS)
    step = np.diff(windows, axis=1)  # neighbours share the trend: half their variance is noise
    mean = windows.mean(1)
    excess = (step.var(1) / 2 - mean) / mean**2
    expected = np.where((days < 5)[:, None], work[None], rest[None]).ravel() / 6
    smooth = np.interp(np.arange(len(expected) * 6) / 6 + 1 / 12, np.arange(len(expected)) + 0.5, expected)
    stray = np.log(windows.sum(1) / smooth)
    keep = float(np.corrcoef(stray[1:], stray[:-1])[0, 1])
    return {
        "weekday": rounded(work / work.mean(), 3),
        "weekend": rounded(rest / work.mean(), 3),
        "stray_sigma": round(float(stray.std()), 3),
        "stray_keep": round(keep, 3),
        "jitter_sigma": round(math.sqrt(max(0.0, float(np.median(excess)))), 3),
    }


def mixture(kind: str) -> dict[str, object]:
    """Lognormal mixtures of (prompt, response) by expectation and maximisation, and the CV of gaps without the pauses
    longer than a minute (the code trace has one that is no burst of its own)."""
    trace = rows(f"azure_2023_{kind}.csv.gz")
    pairs = np.array([(int(r["prompt_tokens"]), int(r["response_tokens"])) for r in trace], float)
    logs = np.log(np.maximum(pairs, 1))
    gaps = np.diff([float(r["t_s"]) for r in trace])
    blocks = [g for g in np.array_split(gaps, 40) if g.max() < 60]
    return {
        "gap_cv": round(float(np.median([g.std() / g.mean() for g in blocks])), 3),
        "parts": expectation_maximisation(logs, NUM_PARTS),
        "max_prompt": int(pairs[:, 0].max()),
        "max_response": int(pairs[:, 1].max()),
        "min_response": int(pairs[:, 1].min()),
    }


def expectation_maximisation(x: np.ndarray, num: int) -> list[list[float]]:
    """Rows of share, mean and sigma of log prompt, mean and sigma of log response; largest share first."""
    order = np.argsort(x[:, 0] + 0.5 * x[:, 1], kind="stable")
    groups = np.array_split(order, num)
    share = np.full(num, 1 / num)
    mean = np.array([x[g].mean(0) for g in groups])
    sigma = np.array([x[g].std(0) + 0.05 for g in groups])
    for _ in range(400):
        far = (x[:, None, :] - mean[None]) / sigma[None]
        log_likely = np.log(share)[None] - np.log(sigma).sum(1)[None] - 0.5 * (far**2).sum(2)
        top = log_likely.max(1, keepdims=True)
        mine = np.exp(log_likely - top)
        mine /= mine.sum(1, keepdims=True)
        weight = mine.sum(0)
        share = weight / len(x)
        mean = (mine.T @ x) / weight[:, None]
        spread = np.einsum("nk,nkd->kd", mine, (x[:, None, :] - mean[None]) ** 2) / weight[:, None]
        sigma = np.sqrt(np.maximum(spread, 0.02**2))
    found = sorted(zip(share, mean, sigma, strict=True), key=lambda part: -part[0])
    return [rounded([s, m[0], d[0], m[1], d[1]], 4) for s, m, d in found]


def tenants() -> dict[str, object]:
    """ServeGen's clients, each as one served model."""
    clients: dict[tuple[str, str], list[tuple[int, int, float]]] = defaultdict(list)
    for r in rows("servegen_clients_10min.csv.gz"):
        clients[r["model"], r["client"]].append((int(float(r["t_s"])) // WINDOW_S, int(r["requests"]), float(r["cv"])))
    span: dict[str, int] = defaultdict(int)
    for (model, _), windows in clients.items():
        span[model] = max(span[model], max(w[0] for w in windows) + 1)
    lograte, active, runs, cvs, strays, keeps, daily = [], [], [], [], [], [], []
    for (model, _), windows in clients.items():
        num = span[model]
        counts = np.zeros(num)
        for at, requests, _ in windows:
            counts[at] += requests
        lograte.append(math.log10(counts.sum() / (num * WINDOW_S)))
        on = counts > 0
        if counts.sum() > 2000 and num > 1000:
            same = counts[144:].std() > 0 and counts[:-144].std() > 0
            daily.append(float(np.corrcoef(counts[144:], counts[:-144])[0, 1]) if same else 0.0)
        active.append(min(1 - 1 / num, max(1 / num, on.mean())))
        starts = int(on[0]) + int((on[1:] & ~on[:-1]).sum())
        runs.append(math.log(on.sum() / starts))
        busy = [cv for _, requests, cv in windows if requests >= 20]
        if len(busy) > 10:
            cvs.append(math.log(float(np.median(busy))))
        both = on[1:] & on[:-1] & (counts[1:] >= 20) & (counts[:-1] >= 20)
        if both.sum() > 100:
            stray = np.log(np.where(on, counts, 1))
            strays.append(float(stray[on].std()))
            if stray[1:][both].std() > 0 and stray[:-1][both].std() > 0:
                keeps.append(float(np.corrcoef(stray[1:][both], stray[:-1][both])[0, 1]))
    rate = np.array(lograte)
    z = (rate - rate.mean()) / rate.std()
    probit = np.array([NormalDist().inv_cdf(f) for f in active])
    slope, base = np.polyfit(z, probit, 1)
    run_slope, run_base = np.polyfit(probit, runs, 1)
    return {
        "rate_sigma_log10": round(float(rate.std()), 3),
        "active_base": round(float(base), 3),
        "active_slope": round(float(slope), 3),
        "active_sigma": round(float((probit - base - slope * z).std()), 3),
        "run_base": round(float(run_base), 3),
        "run_slope": round(float(run_slope), 3),
        "cv_quantiles": rounded(np.exp(np.quantile(cvs, np.linspace(0, 1, 11))), 3),
        "stray_quantiles": rounded(np.quantile(strays, np.linspace(0, 1, 11)), 3),
        "stray_keep": round(float(np.median(keeps)), 3),
        "daily_share": round(float((np.array(daily) > 0.7).mean()), 3),
    }


def tenant_lengths() -> dict[str, object]:
    """Medians of prompt and response over clients, and how far one client's requests stray from them."""
    clients: dict[tuple[str, str], list[list[float]]] = defaultdict(list)
    names = ("prompt_p50", "prompt_p99", "resp_p50", "resp_p99")
    for r in rows("servegen_client_lengths_6h.csv.gz"):
        clients[r["model"], r["client"]].append([max(1.0, float(r[n] or 1)) for n in names])
    m = np.log([np.median(np.array(v), axis=0) for v in clients.values()])
    z99 = NormalDist().inv_cdf(0.99)
    tenths = np.linspace(0, 1, 11)
    return {
        "prompt_log_mean": round(float(m[:, 0].mean()), 3),
        "prompt_log_sigma": round(float(m[:, 0].std()), 3),
        "response_log_mean": round(float(m[:, 2].mean()), 3),
        "response_log_sigma": round(float(m[:, 2].std()), 3),
        "correlation": round(float(np.corrcoef(m[:, 0], m[:, 2])[0, 1]), 3),
        "prompt_sigma_quantiles": rounded(np.quantile(np.maximum(0, m[:, 1] - m[:, 0]) / z99, tenths), 3),
        "response_sigma_quantiles": rounded(np.quantile(np.maximum(0, m[:, 3] - m[:, 2]) / z99, tenths), 3),
    }


def rounded(values: object, digits: int) -> list[float]:
    return [round(float(v), digits) for v in np.asarray(values)]


def literal(value: object) -> str:
    """A value as TOML has it: of lists one a line, of many numbers twelve a line."""
    if not isinstance(value, list):
        return repr(value)
    items, each = [literal(v) for v in value], 1 if isinstance(value[0], list) else 12
    if each > 1 and len(items) <= each:
        return f"[{', '.join(items)}]"
    lines = (f"    {', '.join(items[at : at + each])},\n" for at in range(0, len(items), each))
    return f"[\n{''.join(lines)}]"


HEADER = """\
# What the generator was fitted to. Written by bench/fit/generator.py: change that script, not this file.
#
# Sources: Azure LLM inference trace 2024 (10 s counts of five days; CC-BY 4.0, DynamoLLM, HPCA 2025) for the cycles;
# its 2023 trace (40 minutes of requests; CC-BY 4.0, Splitwise, ISCA 2024) for lengths and gaps; ServeGen (320 clients,
# 10 days; Apache-2.0) for fleets. Rates are shares of a mean, lengths natural logarithms of tokens.
"""


def main() -> None:
    tables = {
        "conversation": profile("conv") | mixture("conv"),
        "code": profile("code") | mixture("code"),
        "tenants": tenants(),
        "tenant_lengths": tenant_lengths(),
    }
    out = [HEADER]
    for name, fields in tables.items():
        out.append(f"\n[{name}]\n" + "".join(f"{key} = {literal(value)}\n" for key, value in fields.items()))
    sys.stdout.write("".join(out))


if __name__ == "__main__":
    main()
