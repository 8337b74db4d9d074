"""Adapt the pages for the site, as a hook of mkdocs (mkdocs.yml), which `make site` runs.

The pages are written for a repository: they link to its other files, and their fences have marks for tests/howto. The
site adds the four pages beside docs/ and those that `make docs` draws from code; in the repository, links to the latter
name the file that draws them. A link to any other file becomes its text alone.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
BESIDE = {  # a page beside docs/ -> its name on the site
    "README.md": "first-minute.md",
    "ARCHITECTURE.md": "architecture.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
DRAWN = {  # a file that draws a page -> the page's name, in build/docs and on the site
    "docs/capabilities.py": "capabilities.md",
    "docs/configuration.py": "configuration.md",
    "docs/instance_states.py": "instance-states.md",
    "libs/glowplug/events/document.py": "events.md",
    "libs/glowplug/telemetry/document.py": "metrics.md",
}
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\]\([^)]*\))*)\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^\s*```")
_BLOCK = re.compile(r"^(?:[-*] |\d+\. |\|)")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages beside docs/ and the drawn ones."""
    from mkdocs.structure.files import File  # only where the site is built

    for name, on_site in [*BESIDE.items(), *((f"build/docs/{page}", page) for page in DRAWN.values())]:
        files.append(File.generated(config, on_site, content=(ROOT / name).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Convert the page for the site's Markdown."""
    return for_site(markdown, page.file.src_uri)


def for_site(markdown: str, page: str) -> str:
    """Convert a page. `page` is its name on the site, relative to docs/."""
    source = next((name for name, on_site in BESIDE.items() if on_site == page), f"docs/{page}")
    out: list[str] = []
    fenced = False
    for line in markdown.splitlines():
        if _FENCE.match(line):
            out.append(re.sub(r"(```\w+) .*", r"\1", line))  # without the marks for tests/howto
            fenced = not fenced
        elif fenced:
            out.append(line)
        else:
            if _BLOCK.match(line) and out and out[-1].strip() and not _goes_on(out[-1], line):
                out.append("")  # GitHub needs no blank line before a list or a table
            out.append(line)
    parts = re.split(r"(?ms)(^\s*```.*?^\s*```$)", "\n".join(out))
    return "".join(part if i % 2 else _LINK.sub(lambda m: _link(m, source, page), part) for i, part in enumerate(parts))


def _goes_on(before: str, line: str) -> bool:
    """Whether `line` belongs to the list or table that `before` is part of."""
    return bool(_BLOCK.match(before)) or (before.startswith("  ") and not line.startswith("|"))


def _link(found: "re.Match[str]", source: str, page: str) -> str:
    """Convert one link or picture of a page at `source` in the repository."""
    text = _LINK.sub(lambda m: _link(m, source, page), found[2])
    path, _, anchor = found[3].partition("#")
    if re.match(r"[a-z]+:", found[3]) or not path:
        return f"{found[1]}[{text}]({found[3]})"
    target = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
    on_site = (BESIDE | DRAWN).get(target, target.removeprefix("docs/") if target.startswith("docs/") else "")
    if not on_site or not (ROOT / target).is_file():
        folder = f"{target}/README.md"
        if not (ROOT / folder).is_file() or not folder.startswith("docs/"):
            return text
        on_site = folder.removeprefix("docs/")
    relative = posixpath.relpath(on_site, posixpath.dirname(page) or ".")
    return f"{found[1]}[{text}]({relative}{'#' + anchor if anchor else ''})"
