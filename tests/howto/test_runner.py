"""The runner fails on every fault: else a page that passes would prove nothing."""

import pytest

from tests.howto.blocks import Page, parse
from tests.howto.example import applied, made_by, run_example
from tests.howto.sandbox import PageFailed, run_page
from tests.howto.static import problems


@pytest.mark.parametrize(
    ("page", "why"),
    [
        ("```sh\nfalse\ntrue\n```", "ended with 1, not 0"),
        ("```sh\necho a\necho ab\n```\n```text\nab\na\n```", "never printed 'a'"),
        ("```sh exits=1\ntrue\n```", "ended with 0, not 1"),
        ("```sh\nno-such-command\n```", "ended with 127"),
        ("```sh\nexit 5\n```", "ended with 5"),
    ],
)
def test_a_page_that_is_wrong_fails_with_its_line(page: str, why: str) -> None:
    with pytest.raises(PageFailed, match=why) as failure:
        run_page(parse("page.md", page))
    assert str(failure.value).startswith("page.md:1 ")


def test_what_cannot_be_run_is_held_against_what_there_is() -> None:
    for text, why in (
        ("glowplug uup", "no verb 'uup'"),
        ("X=1 glowplug up --fast | cat", "has no --fast"),
        ("make nothing", "no `make nothing`"),
        ("kubectl apply -k deploy/nowhere", "there is no deploy/nowhere"),
        ("docker compose -f deploy/no.yml up", "there is no deploy/no.yml"),
        ("if true; then", "does not parse"),
    ):
        (block,) = parse("page.md", f"```sh needs=docker\n{text}\n```\n").blocks
        assert any(why in line for line in problems(block)), text


def example(*blocks: tuple[str, str, str], commands: str = "") -> Page:
    parts = [f"`{path}`, which is\n\n```{language}\n{text}\n```\n" for path, language, text in blocks]
    return parse("docs/extend/page.md", "\n".join([*parts, f"```sh\n{commands}\n```\n" if commands else ""]))


TREE = {"a.py": "one\ntwo\nthree\ntwo\nfour\n"}


def test_an_example_adds_files_and_changes_others_place_by_place() -> None:
    read = example(("b.py", "python", "new"), ("a.py", "diff", " one\n-two\n+2\n@@\n three\n+and\n two"))
    assert applied(read, TREE.get) == {"b.py": "new\n", "a.py": "one\n2\nthree\nand\ntwo\nfour\n"}
    assert made_by(read) == {"b.py"}


def test_an_example_is_run_in_a_tree_of_its_own() -> None:
    new = ("libs/glowplug/domain/later.py", "python", '"""Later."""\n\nLATER = 1')
    seen = "python -c 'from glowplug.domain.later import LATER; print(LATER)'"
    assert run_example(example(new, commands=f"{seen}\necho >>deploy/k8s/base/nats-users.conf")) == 1
    with pytest.raises(PageFailed, match=r"what no block names.*README\.md"):
        run_example(example(new, commands="echo >>README.md"))
    many = [(f"docs/{n}.md", "md", "new") for n in range(5)]
    with pytest.raises(PageFailed, match="changes 5 files, and may change 4"):
        run_example(example(*many))
