"""What all tests share: how hypothesis runs, and where the collections lie that are not part of the project."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from forked import Forked, forked
from hypothesis import settings

# Examples in the same order on every machine, and no deadline: a slow machine is no failure.
settings.register_profile("memdiag", deadline=None, derandomize=True)
settings.load_profile("memdiag")


def pytest_collection_finish() -> None:
    """The recorder looks through all objects now and then: what the modules of all tests have imported, some half a
    million of them, is put out of its sight."""
    gc.collect()
    gc.freeze()


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """So is what the tests of a file have imported as they ran, such as compilers, once they are through."""
    if nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()


def folder_in(variable: str) -> Path:
    name = os.environ.get(variable)
    if not name:
        pytest.skip(f"{variable} names no folder")
    folder = Path(name)
    if not folder.is_dir():  # a wrong path would otherwise skip in silence what was asked for
        pytest.fail(f"{variable} is {name}, which is no folder")
    return folder


@pytest.fixture(scope="session")
def cases_folder() -> Path:
    """The case collection: training scripts with known answers. Tests that use it skip where there is none."""
    return folder_in("MEMDIAG_CASES")


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """Measurements of real devices. Tests that use it skip where there are none."""
    return folder_in("MEMDIAG_DATA")


@pytest.fixture(scope="session")
def runs() -> Iterator[Forked]:
    """Where runs of a check are started."""
    with forked() as started:
        yield started
