"""How a service process begins: its modules are imported with the garbage collector off."""

import gc
import importlib


def run_service(module: str) -> None:
    """Import `module` and call its `main`.

    Hardly anything that an import allocates is garbage, and the collector would walk all of it again and again: a sixth
    of a service's start. What has been imported stays, so that later collections need not walk it either.
    """
    gc.disable()
    main = importlib.import_module(module).main
    gc.freeze()
    gc.enable()
    main()
