"""Begin a process: import with the garbage collector off."""

import gc
import importlib
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """Run a block of imports. They make hardly any garbage, and collections during them cost a sixth of a service's
    start; imported objects are then frozen, as they stay."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def run_service(module: str) -> None:
    with importing():
        main = importlib.import_module(module).main
    main()
