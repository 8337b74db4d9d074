"""Findings of the doctor, one per check, and their display."""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

from glowplug.cli.terminal import in_line

_USERINFO = re.compile(r"(?<=://)[^/@\s]+@")
SHORTEST = 4  # a shorter secret would redact half of every sentence


class Level(StrEnum):
    OK = "ok"
    WARN = "warn"  # works, but not as it should, or not for long
    FAIL = "fail"
    SKIPPED = "skipped"  # could not be checked, or does not apply


@dataclass(frozen=True, slots=True)
class Finding:
    """`about`: the subject ("disk", "agent-1"); `says`: one sentence; `do`: the remedy or "". Never contains
    secrets."""

    level: Level
    area: str
    about: str
    says: str
    do: str = ""


@dataclass(frozen=True, slots=True)
class Findings:
    area: str

    def ok(self, about: str, says: str) -> Finding:
        return Finding(Level.OK, self.area, about, says)

    def warn(self, about: str, says: str, do: str) -> Finding:
        return Finding(Level.WARN, self.area, about, says, do)

    def fail(self, about: str, says: str, do: str) -> Finding:
        return Finding(Level.FAIL, self.area, about, says, do)

    def skipped(self, about: str, says: str, do: str = "") -> Finding:
        return Finding(Level.SKIPPED, self.area, about, says, do)


def summary(findings: Iterable[Finding]) -> dict[str, int]:
    counts = Counter(finding.level for finding in findings)
    return {level.value: counts[level] for level in Level}


def document(findings: list[Finding]) -> dict[str, Any]:
    """Return `--output json`: `healthy`, `counts` by level, and the findings."""
    return {
        "healthy": not any(finding.level is Level.FAIL for finding in findings),
        "counts": summary(findings),
        "findings": [asdict(finding) for finding in findings],
    }


def lines(findings: list[Finding], *, only_bad: bool = False) -> list[str]:
    shown = [f for f in findings if not only_bad or f.level in (Level.WARN, Level.FAIL)]
    width = max((len(f.about) for f in shown), default=0)
    out: list[str] = []
    for area in dict.fromkeys(f.area for f in shown):
        out += ["", area] if out else [area]
        for finding in (f for f in shown if f.area == area):
            out.append(f"  {finding.level.value:<7}  {in_line(finding.about):<{width}}  {in_line(finding.says)}")
            if finding.do and finding.level is not Level.OK:
                out.append(f"  {'':<7}  {'':<{width}}  do: {finding.do}")
    counts = summary(findings)
    tally = f"{counts['ok']} ok, {counts['warn']} to look at, {counts['fail']} failed, {counts['skipped']} skipped"
    return [*out, *([""] if out else []), tally]


def redacted(findings: Iterable[Finding], secrets: Iterable[str]) -> list[Finding]:
    """Replace secrets, and user information of addresses, by `***`: libraries' error messages quote addresses with
    tokens."""
    words = sorted({word for word in secrets if len(word) >= SHORTEST}, key=len, reverse=True)

    def clean(text: str) -> str:
        for word in words:
            text = text.replace(word, "***")
        return _USERINFO.sub("***@", text)

    return [replace(f, says=clean(f.says), do=clean(f.do), about=clean(f.about)) for f in findings]
