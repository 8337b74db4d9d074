"""How a process begins: its modules are imported with the garbage collector off."""

import gc
import importlib
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """The block imports, and does nothing else.

    Hardly anything that an import allocates is garbage, and the collector would walk all of it again and again: a sixth
    of a service's start. What has been imported stays, so that later collections need not walk it either.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def run_service(module: str) -> None:
    """Import `module` and call its `main`."""
    with importing():
        main = importlib.import_module(module).main
    main()
