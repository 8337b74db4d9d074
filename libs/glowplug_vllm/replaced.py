"""A name of a module or of a class that holds something else for a while."""

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def replaced(owner: Any, name: str, new: Any) -> Iterator[None]:
    """Within it `owner.name` is `new`. A static method of a class comes back as one."""
    old = owner.__dict__[name] if isinstance(owner, type) else getattr(owner, name)
    setattr(owner, name, new)
    try:
        yield
    finally:
        setattr(owner, name, old)
