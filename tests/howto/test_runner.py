"""The runner itself: what it reads of a page, what it refuses, and that a wrong page fails."""

from pathlib import Path

import pytest

from tests.howto.blocks import BadFence, Block, Page, expected, parse, shows
from tests.howto.sandbox import PageFailed, run_page
from tests.howto.static import commands, problems

PAGE = """
# A page
<!-- fleet: engine=emulated nodes=1 -->
```yaml file=a.yaml
name: a
```
```sh
one
```

```text
said ...
```

- in a list

      no fence

  ```sh needs=gpu,root exits=3
  two \\
    more
  ```
"""


def block(text: str, info: str = "sh") -> Block:
    return parse("page.md", f"```{info}\n{text}\n```\n").blocks[0]


def page(*texts: str) -> Page:
    return parse("page.md", "\n".join(f"```{text}\n```" for text in texts))


def test_a_page_is_read_with_its_fences_words_and_outputs() -> None:
    read = parse("page.md", PAGE)
    assert read.fleet == {"engine": "emulated", "nodes": "1"}
    assert [b.language for b in read.blocks] == ["yaml", "sh", "text", "sh"]
    first, second = read.commands
    assert expected(read, first) == "said ...\n"
    assert expected(read, second) == ""
    assert second.needs == {"gpu", "root"}
    assert second.exit_code == 3
    assert second.text == "two \\\n  more\n"
    assert second.line == 19


@pytest.mark.parametrize(
    "text",
    [
        "```bash\nls\n```\n",
        "```sh needs=luck\nls\n```\n",
        "```sh needs=\nls\n```\n",
        "```sh maybe\nls\n```\n",
        "```sh exits=x\nls\n```\n",
        "```sh\nls\n",
    ],
)
def test_a_fence_that_says_something_unknown_is_refused(text: str) -> None:
    with pytest.raises(BadFence, match=r"page\.md:1"):
        parse("page.md", text)


@pytest.mark.parametrize(
    ("wanted", "output", "missing"),
    [
        ("a\nb\n", "a\nb\n", ""),
        ("a\n...\nc\n", "x\na\nb\nc\n", ""),
        ("b\na\n", "a\nb\n", "a"),
        ("took ... s, ok", "took 1.25 s, ok\n", ""),
        ("node-1  up", "node-1     up\n", ""),
        ("took 1", "took 12\n", "took 1"),
        ("ok ... agent ... ready ...", "  ok       agent of node-9       ready\n", ""),
        ("ok ... agent", "nok agent\n", "ok ... agent"),
    ],
)
def test_expected_lines_come_in_order(wanted: str, output: str, missing: str) -> None:
    assert shows(wanted, output) == missing


def test_one_shell_runs_the_page() -> None:
    assert (
        run_page(
            page(
                "yaml file=a.txt\nhello",
                "sh\nmkdir sub && cd sub && export WHO=me",
                "sh\npwd; echo $WHO; cat ../a.txt",
                "text\n.../clone/sub\nme\nhello",
                "sh exits=3\nsh -c 'exit 3'",
                "sh needs=gpu\nfalse",
                "sh background=is_up\necho is; echo it is up; sleep 60",
                "sh\ncase $GLOWPLUG_PORT_BASE in 8000) exit 1;; esac\necho 127.0.0.1:8000 | grep $GLOWPLUG_PORT_BASE",
            )
        )
        == 5
    )


@pytest.mark.parametrize(
    ("texts", "why"),
    [
        (("sh\nfalse\ntrue",), "ended with 1, not 0"),
        (("sh\necho a", "text\nb"), "never printed 'b'"),
        (("sh exits=1\ntrue",), "ended with 0, not 1"),
        (("sh\nno-such-command",), "ended with 127"),
        (("sh\nexit 5",), "ended with 5"),
    ],
)
def test_a_page_that_is_wrong_fails_with_its_line(texts: tuple[str, ...], why: str) -> None:
    with pytest.raises(PageFailed, match=why) as failure:
        run_page(page(*texts))
    assert str(failure.value).startswith("page.md:1 ")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("glowplug up --detach && glowplug status -o json", ""),
        ("glowplug uup", "no verb 'uup'"),
        ("X=1 glowplug up --fast | cat", "has no --fast"),
        ("make up ENGINE=emulated", ""),
        ("make nothing", "no `make nothing`"),
        ("kubectl apply -k deploy/nowhere", "there is no deploy/nowhere"),
        ("sudo sh deploy/local/missing", "there is no deploy/local/missing"),
        ("sh deploy/local/install .venv local", ""),
        ("docker compose -f deploy/no.yml up", "there is no deploy/no.yml"),
        ("if true; then", "does not parse"),
        ("cat <<'EOF' >x\nglowplug nonsense\nEOF", ""),
    ],
)
def test_what_cannot_be_run_is_held_against_what_there_is(text: str, why: str) -> None:
    found = problems(block(text, "sh needs=docker"))
    assert any(why in line for line in found) if why else not found, found


def test_commands_are_found_behind_assignments_and_redirections() -> None:
    text = "A=1 sudo one -x \\\n  more >out 2>&1 | two && three # four\n"
    assert list(commands(text)) == [["one", "-x", "more", "2"], ["two"], ["three"]]


def test_a_folder_of_a_page_is_gone_afterwards(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    run_page(page(f"sh\npwd >{seen}"))
    assert not Path(seen.read_text().strip()).exists()


def test_a_page_cannot_install_into_the_environment_of_the_tests() -> None:
    assert run_page(page("sh\nmake install", "sh\nmake -n up", "text\n.venv/bin/glowplug up ...")) == 2
