"""Keeps secrets out of what is printed: error messages of libraries quote addresses, and addresses carry tokens."""

import re
from collections.abc import Iterable
from dataclasses import replace

from glowplug.cli.doctor.findings import Finding

_USERINFO = re.compile(r"(?<=://)[^/@\s]+@")
SHORTEST = 4  # a shorter word would take half of every sentence with it


def redacted(findings: Iterable[Finding], secrets: Iterable[str]) -> list[Finding]:
    """The findings with each secret, and whatever stands before the @ of an address, as `***`."""
    words = sorted({word for word in secrets if len(word) >= SHORTEST}, key=len, reverse=True)

    def clean(text: str) -> str:
        for word in words:
            text = text.replace(word, "***")
        return _USERINFO.sub("***@", text)

    return [replace(f, says=clean(f.says), do=clean(f.do), about=clean(f.about)) for f in findings]
