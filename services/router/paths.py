"""The paths of the data port, and variants that clients send: `/v1` left out or doubled, and doubled slashes."""

from glowplug.engines import apis

_UNDER_V1 = frozenset(
    b"chat/completions completions embeddings responses messages messages/count_tokens rerank models "
    b"files batches".split()
)
_UNDER_V1 |= frozenset(path.removeprefix("/v1/").encode() for path in apis.AUDIO)
AT_ROOT = frozenset(b"tokenize detokenize metrics health live ready livez readyz openapi.json".split())
OLLAMA = frozenset(
    b"/api/chat /api/generate /api/embed /api/embeddings /api/tags /api/ps /api/version /api/show /api/pull".split()
)
AT_ROOT |= frozenset(path.removeprefix(b"/") for path in OLLAMA)
AS_THEY_ARE = frozenset(b"/v1/" + path for path in _UNDER_V1) | frozenset(b"/" + path for path in AT_ROOT) | {b"/"}
_ONE_OF = (b"models/", b"files/", b"batches/")


def canonical(path: bytes) -> bytes:
    """Return the port's path for a client's variant; an unknown path stays."""
    parts = [part for part in path.split(b"/") if part]
    while parts and parts[0] == b"v1":
        del parts[0]
    rest = b"/".join(parts)
    if not rest:
        return b"/"
    if rest in _UNDER_V1 or rest.startswith(_ONE_OF):
        return b"/v1/" + rest
    return b"/" + rest if rest in AT_ROOT else path
