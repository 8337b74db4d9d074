"""One engine, one set of images and one fleet for the whole lane."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.compose.engine import Engine, NoEngine, base_image, build_images
from tests.compose.fleet import ComposeFleet


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    """An engine with every image built from this checkout. Skips if none is available."""
    made = Engine()
    try:
        try:
            made.start()
            base = base_image()
        except NoEngine as error:
            pytest.skip(str(error))
        build_images(base)
        yield made
    finally:
        made.stop()


@pytest.fixture(scope="module")
def fleet(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComposeFleet]:
    """One fleet per file of tests: its health checks would slow down later ones."""
    folder: Path = tmp_path_factory.mktemp("compose")
    made = ComposeFleet(engine.compose, folder / "env")
    try:
        yield made.up()
    finally:
        made.down()
