"""The local fast path: for a client on the daemon's host.

It reads the index and the arenas in place, and hands over its saves in staging memory. At the
hand-over the daemon says what the client may use, and why not the rest.
"""
