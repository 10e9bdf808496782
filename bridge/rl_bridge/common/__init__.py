"""Tools for every room: files, locks, signals, HTTP, the user's Python files."""
