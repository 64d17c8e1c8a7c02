"""A soak: clients work on a daemon for a long time, and nothing of it grows."""
