"""The blocks of a prompt, for routing by prefixes (policies/routing/prefix_index.py). Only hashes leave this module,
and they mean nothing outside this process: Python's hash of a text has a key of its own in each.

Blocks are of characters, at four a token. Engines render prompts with a template that this router does not know; it
puts tools before all messages and messages in their order, and so does the text that is hashed here. Where two prompts
differ in what is not read here (images, a template's settings), the estimate is wrong and engines correct it.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from glowplug.policies.routing.prefix_index import Prefix
from glowplug.services.router import request_shapes as shapes
from glowplug.services.router.conversation import text_of
from glowplug.services.router.request_body import CHARS_PER_TOKEN

MOST_BLOCKS = 4096  # of one prompt


def prefix_of(asked: Any, block_tokens: int) -> Prefix:
    """The blocks of a request's prompt, of so many tokens each; none of several prompts."""
    if isinstance(asked, shapes.CompletionAsked):
        return _of_completion(asked.prompt, block_tokens)
    return blocks("\0".join(texts_of(asked)), block_tokens * CHARS_PER_TOKEN)


def _of_completion(prompt: Any, block_tokens: int) -> Prefix:
    """The blocks of one text, or of one list of token ids."""
    if isinstance(prompt, list) and len(prompt) == 1:
        (prompt,) = prompt
    if isinstance(prompt, str):
        return blocks(prompt, block_tokens * CHARS_PER_TOKEN)
    ids = tuple(prompt[: block_tokens * MOST_BLOCKS]) if isinstance(prompt, list) else ()
    return blocks(ids, block_tokens) if all(isinstance(one, int) for one in ids) else ()


def blocks(prompt: str | tuple[Any, ...], size: int) -> Prefix:
    """Chained hashes of the whole blocks of a text, or of token ids: of so many each, `MOST_BLOCKS` at most."""
    last, found = hash("the key of this process"), []
    for at in range(size, min(len(prompt), size * MOST_BLOCKS) + 1, size):
        last = hash((last, prompt[at - size : at]))
        found.append(last)
    return tuple(found)


def texts_of(asked: Any) -> Iterator[str]:
    """The texts of a conversation in the order in which an engine reads them; none of a request that has none."""
    yield from _tool_names(getattr(asked, "tools", None) or ())
    if isinstance(asked, shapes.ChatAsked):
        yield from _said(asked.messages)
    elif isinstance(asked, shapes.MessagesAsked):
        yield text_of(asked.system)
        yield from _said(asked.messages)
    elif isinstance(asked, shapes.ResponseAsked):
        yield asked.instructions or ""
        if isinstance(asked.input, str):
            yield asked.input
        else:
            yield from _said(asked.input)


def _said(turns: Iterable[Any]) -> Iterator[str]:
    """What was said, by whom, with the calls of tools and what came of them."""
    for turn in turns:
        yield turn.role or ""
        yield from _texts(turn.content)
        yield from _texts(getattr(turn, "output", None))
        for call in getattr(turn, "tool_calls", None) or ():
            yield call.function.arguments


def _texts(content: Any) -> Iterator[str]:
    if isinstance(content, str):
        yield content
        return
    for piece in content or ():
        yield piece.text or ""
        yield from _texts(getattr(piece, "content", None))  # of a tool's result in a message of Anthropic's API


def _tool_names(tools: Iterable[Any]) -> Iterator[str]:
    for tool in tools:
        yield getattr(getattr(tool, "function", tool), "name", None) or ""
