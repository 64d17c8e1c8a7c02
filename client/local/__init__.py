"""The local fast path: for a client on the daemon's host.

It reads the index, the arenas and the disk tier where they lie, and hands its saves over in
staging memory. What it may use, and why not the rest, the daemon says at the hand-over.
"""
