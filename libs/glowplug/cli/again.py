"""The command line that runs one case of a what-if again: what a broken run prints, for a person to paste."""

import os
import shlex
from collections.abc import Iterable
from pathlib import Path

from glowplug.simulator.sweep import Case

DATA = "GLOWPLUG_DATA"


def command(verb: str, target: Path | None, case: Case, settings: Iterable[str], options: Iterable[str]) -> str:
    """`glowplug VERB TARGET` (None: no target) with every setting of the command and of the case's own variant, in the
    order they were laid over, then `options`; quoted for a shell, with the data folder in front where the environment
    names one."""
    words = ["glowplug", verb, *([str(target)] if target is not None else [])]
    for setting in (*settings, *case.settings):
        words += ["--set", setting]
    words += options
    if case.check:
        words.append("--check")
    told = os.environ.get(DATA, "")
    return (f"{DATA}={shlex.quote(told)} " if told else "") + shlex.join(words)
