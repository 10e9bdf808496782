"""What each test of this room begins and ends with."""

import pytest

from rl_bridge.common.terminal import remarks


@pytest.fixture(autouse=True)
def no_remarks():
    """Lines that one test has named are none of the next one's."""
    remarks()
    yield
    remarks()
