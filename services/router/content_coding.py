"""Request bodies that are compressed or begin with a byte order mark, decoded within the size limit of a body, since
engines take plain JSON only."""

import zlib

from glowplug.services.router.api_errors import ApiError, refused
from glowplug.services.router.http_request import HttpRequest, body_too_large
from glowplug.services.router.settings import Limits

BOM = b"\xef\xbb\xbf"
ENCODING = b"content-encoding"
TAKEN = "gzip, deflate"
ACCEPTED = b"accept-encoding: gzip, deflate\r\n"  # beside a 415 (RFC 9110, 12.5.3)
_AUTO, _RAW = 47, -15  # zlib's window bits: a gzip or zlib header, none
_MOST_MEMBERS = 32  # of one gzip body; each costs a copy of the bytes after it
_GZIP = frozenset((b"gzip", b"x-gzip"))


def decode(request: HttpRequest, limits: Limits) -> int:
    """Decode the request's body in place and remove its content-encoding header. Returns by how many bytes the body has
    grown. Raises ApiError."""
    before, encoding = request.body, request.headers.pop(ENCODING, b"").strip().lower()
    if encoding not in (b"", b"identity"):
        if encoding not in _GZIP and encoding != b"deflate":
            shown = encoding[:100].decode("ascii", "replace")
            message = f"The content-encoding `{shown}` is not taken; send the body plain, or as {TAKEN}."
            raise refused(415, message, "unsupported_media_type")
        request.body = _inflated(before, encoding, limits)
    request.body = request.body.removeprefix(BOM)
    return len(request.body) - len(before)


def _inflated(body: bytes, encoding: bytes, limits: Limits) -> bytes:
    """Decompress a body, and stop once it exceeds the size limit of a body. Raises ApiError."""
    is_gzip = encoding in _GZIP
    bits = _AUTO if is_gzip or _has_zlib_header(body) else _RAW
    out = bytearray()
    try:
        for _ in range(_MOST_MEMBERS):
            stream = zlib.decompressobj(bits)
            out += stream.decompress(body, limits.body_bytes + 1 - len(out))
            if len(out) > limits.body_bytes:
                raise body_too_large(limits)
            if not stream.eof:
                raise _wrong(encoding, "it ends too early")
            body = stream.unused_data if is_gzip else b""  # a gzip file may have several members
            if not body:
                return bytes(out)
    except zlib.error as error:
        raise _wrong(encoding, str(error)) from error
    raise _wrong(encoding, f"it has more than {_MOST_MEMBERS} members")


def _has_zlib_header(body: bytes) -> bool:
    """Return whether a deflate body has zlib's header (RFC 9110, 8.4.1.2), which some clients leave out."""
    return len(body) > 1 and body[0] & 0x0F == 8 and (body[0] << 8 | body[1]) % 31 == 0


def _wrong(encoding: bytes, why: str) -> ApiError:
    name = encoding.decode()
    return refused(400, f"The body is labelled `content-encoding: {name}`, and is no {name}: {why}.", "invalid_body")
