"""A soak: clients use a daemon for a long time, and none of its resources may grow."""
