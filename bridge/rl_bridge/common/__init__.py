"""What every room may use: files, locks, signals, HTTP, the user's Python files."""
