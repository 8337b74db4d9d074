"""The requests of a client to the owner of a GPU's chunks. Any other message is refused as a whole."""

from typing import Annotated

from msgspec import Meta, Struct

Count = Annotated[int, Meta(ge=0)]


class Take(Struct, frozen=True, tag_field="verb", tag="take"):
    """Take free chunks: exactly so many, or as many of them as there are."""

    num_chunks: Count
    at_most: bool = False


class Give(Struct, frozen=True, tag_field="verb", tag="give"):
    """Give back chunks that the client has stopped using."""

    ids: list[str]


class Publish(Struct, frozen=True, tag_field="verb", tag="publish"):
    """Publish chunks of the client as weights under a name, in this order."""

    name: str
    ids: Annotated[list[str], Meta(min_length=1)]
    num_bytes: Count


class Attach(Struct, frozen=True, tag_field="verb", tag="attach"):
    """Become another holder of the chunks under a name."""

    name: str


class Adopt(Struct, frozen=True, tag_field="verb", tag="adopt"):
    """Report chunks that a former owner lent; their descriptors follow. `names`: ids and bytes of those that are
    published."""

    ids: list[str]
    names: dict[str, tuple[list[str], Count]] = {}


class Holdings(Struct, frozen=True, tag_field="verb", tag="holdings"):
    """Ask for the chunks that each process holds."""


Request = Take | Give | Publish | Attach | Adopt | Holdings
