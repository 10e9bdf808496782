import importlib.util

import pytest

from rl_bridge.environments import environment_calls
from tests.support.warm_environments import Template

# Its tests need the extra (make test-openenv), and this suite runs without extras.
collect_ignore = [] if importlib.util.find_spec("openenv") else ["test_openenv.py", "openenv_server.py"]


@pytest.fixture(scope="module")
def template():
    """The process that those of ``warm_environments`` are forked from."""
    template = Template()
    yield template
    template.close()


@pytest.fixture
def warm_environments(template, monkeypatch):
    """Processes of environments begin with everything imported."""
    monkeypatch.setattr(environment_calls, "module_at_socket", template.at_socket)
