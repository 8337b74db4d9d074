"""What a client may ask of the owner of a GPU's chunks. A message that is none of these is refused as a whole."""

from typing import Annotated

from msgspec import Meta, Struct

Count = Annotated[int, Meta(ge=0)]


class Take(Struct, frozen=True, tag_field="verb", tag="take"):
    """Free chunks: so many, or as many of them as there are."""

    num_chunks: Count
    at_most: bool = False


class Give(Struct, frozen=True, tag_field="verb", tag="give"):
    """Chunks that the client does not use any more."""

    ids: list[str]


class Publish(Struct, frozen=True, tag_field="verb", tag="publish"):
    """Chunks that the client holds become weights under a name, in this order."""

    name: str
    ids: Annotated[list[str], Meta(min_length=1)]
    num_bytes: Count


class Attach(Struct, frozen=True, tag_field="verb", tag="attach"):
    """The chunks under a name: the client holds them, too."""

    name: str


class Adopt(Struct, frozen=True, tag_field="verb", tag="adopt"):
    """Chunks that an owner before this one lent; their descriptors follow. `names`: ids and bytes of what is published
    of them."""

    ids: list[str]
    names: dict[str, tuple[list[str], Count]] = {}


class Holdings(Struct, frozen=True, tag_field="verb", tag="holdings"):
    """Who holds what, by process."""


Request = Take | Give | Publish | Attach | Adopt | Holdings
