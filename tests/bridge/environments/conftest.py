import importlib.util

# Its tests need the extra (make test-openenv), and this suite runs without extras.
collect_ignore = [] if importlib.util.find_spec("openenv") else ["test_openenv.py", "openenv_server.py"]
