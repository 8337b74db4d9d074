"""Who may read the console where a key is set: the key itself, and sessions opened with it at the login page.

Sessions are random, live in memory and end by themselves; a restart ends them all. Wrong keys are counted per address.
"""

import hashlib
import hmac
import ipaddress
import secrets
from collections.abc import Callable
from typing import Final

from glowplug.domain.errors import Contended, Unauthorized

MAX_SESSIONS: Final = 1000  # the oldest leaves
WINDOW_S: Final = 60.0
MAX_WRONG: Final = 10  # from one address in a window: enough for a person, too few to guess
MAX_WRONG_IN_ALL: Final = 300  # from all: whoever has many addresses gets no further
MAX_ADDRESSES: Final = 4096  # remembered at once


class KeyRequired(Unauthorized):
    """The console's key is missing, or the session is over (401)."""

    code = "console_key_required"


class WrongKey(Unauthorized):
    """It is not the console's key (401)."""

    code = "wrong_console_key"


class TooManyWrongKeys(Contended):
    """Wrong keys came too often (429)."""

    code = "too_many_wrong_keys"


class Access:
    """The key of one console and its open sessions. Without a key everybody may read."""

    def __init__(self, key: str, session_s: float, clock: Callable[[], float]) -> None:
        self.is_asked = bool(key)
        self.session_s = session_s
        self._key = key.encode()
        self._clock = clock
        self._sessions: dict[bytes, float] = {}  # digest of the token -> when it ends; oldest first
        self._wrong: dict[str, int] = {}  # network of an address -> wrong keys in this window
        self._window_ends = 0.0

    def log_in(self, key: str, address: str) -> str:
        """The token of a new session. Raises WrongKey, and TooManyWrongKeys without looking at the key."""
        self.check(key, address)
        if len(self._sessions) >= MAX_SESSIONS:
            del self._sessions[next(iter(self._sessions))]
        token = secrets.token_urlsafe(32)
        self._sessions[_digest(token)] = self._clock() + self.session_s
        return token

    def log_out(self, token: str) -> None:
        """End a session."""
        self._sessions.pop(_digest(token), None)

    def is_open(self, token: str) -> bool:
        """Whether this is the token of a session that is not over."""
        digest = _digest(token)
        ends = self._sessions.get(digest, 0.0)
        if ends <= self._clock():
            self._sessions.pop(digest, None)
            return False
        return True

    def check(self, key: str, address: str) -> None:
        """Raises WrongKey, and TooManyWrongKeys without looking at the key."""
        now_s, network = self._clock(), _network(address)
        if now_s >= self._window_ends:
            self._wrong.clear()
            self._window_ends = now_s + WINDOW_S
        is_full = network not in self._wrong and len(self._wrong) >= MAX_ADDRESSES
        if is_full or self._wrong.get(network, 0) >= MAX_WRONG or sum(self._wrong.values()) >= MAX_WRONG_IN_ALL:
            raise TooManyWrongKeys("Wrong keys came too often.", retry_after_s=self._window_ends - now_s)
        if not hmac.compare_digest(key.encode("utf-8", "surrogatepass"), self._key):
            self._wrong[network] = self._wrong.get(network, 0) + 1
            raise WrongKey("That is not this console's key.")


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()


def _network(address: str) -> str:
    """What one person has: an IPv4 address, or the 64 bits of an IPv6 network."""
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return address
    return address if ip.version == 4 else str(ipaddress.ip_network((int(ip), 64), strict=False))
