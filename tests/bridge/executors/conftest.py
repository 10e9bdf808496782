import importlib.util

# Where Ray is not installed, its tests are not there: they would be skipped otherwise, also under another marker.
collect_ignore = [] if importlib.util.find_spec("ray") else ["test_ray.py"]
