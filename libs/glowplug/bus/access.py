"""What a client of NATS needs to be allowed for what it reads and publishes, and nothing beside it.

The server checks the subject of each message a client sends and of each subscription. Three things follow from how it
works, and receivers rely on them:

- A reply goes wherever the request says. Answers of JetStream come back on subjects of the client's own,
  `_INBOX_<user>`, and a user that may read facts could have them delivered elsewhere. Such a message keeps the
  subject it was stored under, so a receiver compares the subject of each event with its content
  (`subjects.is_subject_of`).
- Who creates or updates a stream may have its messages republished on any subject. One user alone may.
- The filter of a reader is checked where it is the only one, as it is for commands. Readers of several kinds of facts
  may read all facts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from glowplug.events.subjects import COMMANDS_STREAM, FACTS_STREAM, checks, of_event, to_service

STREAMS = (FACTS_STREAM, COMMANDS_STREAM)


@dataclass(frozen=True, slots=True, kw_only=True)
class BusAccess:
    """What one client does on the bus."""

    follows: Sequence[str] = ()  # filters of facts it reads durably
    watches: Sequence[str] = ()  # filters it subscribes to without JetStream
    obeys: str = ""  # the service whose commands it takes
    publishes: Sequence[str] = ()  # types of events
    makes_streams: bool = False
    inspects: bool = False  # streams and readers, as `glowplug doctor` does
    reader: str = ""  # the name of its durable reader of commands, where one is known beforehand
    others: Sequence[str] = ()  # known readers of commands that are not its own


def inbox(user: str) -> str:
    """The subjects on which this user gets its answers begin so; no other user may subscribe to them."""
    return f"_INBOX_{user}"


def permissions(user: str, access: BusAccess) -> dict[str, dict[str, list[str]]]:
    """{"publish": {"allow": ..., "deny": ...}, "subscribe": ...} of NATS."""
    allow = [of_event(kind) for kind in access.publishes]
    if access.publishes:
        allow += [checks(stream) for stream in STREAMS]
    allow += [f"$JS.API.STREAM.INFO.{stream}" for stream in STREAMS]
    deny: list[str] = []
    if access.makes_streams:
        allow += [f"$JS.API.STREAM.{verb}.{stream}" for stream in STREAMS for verb in ("CREATE", "UPDATE")]
    if access.inspects:
        allow += [f"$JS.API.CONSUMER.LIST.{stream}" for stream in STREAMS]
    if access.follows:
        only = f".{access.follows[0]}" if len(access.follows) == 1 else ""  # it stands in the subject of the call
        allow += [f"$JS.API.CONSUMER.CREATE.{FACTS_STREAM}.*{only}", *_reading(FACTS_STREAM, "*")]
    if access.obeys:
        name = access.reader or "*"
        allow.append(f"$JS.API.CONSUMER.CREATE.{COMMANDS_STREAM}.{name}.{to_service(access.obeys)}")
        allow += _reading(COMMANDS_STREAM, name)
        if not access.reader:
            for other in access.others:
                deny.append(f"$JS.API.CONSUMER.CREATE.{COMMANDS_STREAM}.{other}.>")
                deny += _reading(COMMANDS_STREAM, other)
    return {
        "publish": {"allow": allow, **({"deny": deny} if deny else {})},
        "subscribe": {"allow": [*access.watches, f"{inbox(user)}.>"]},
    }


def _reading(stream: str, reader: str) -> list[str]:
    return [f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{reader}", f"$JS.ACK.{stream}.{reader}.>"]
