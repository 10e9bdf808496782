"""One folder for all stores of a session: trackio takes one a process."""

import pytest


@pytest.fixture(scope="session")
def output(tmp_path_factory):
    return tmp_path_factory.mktemp("stores")
