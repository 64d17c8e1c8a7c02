"""Engines on one side, prefixd on the other: a module an engine, imported when it is used.

Each is a core that knows nothing of its engine's modules, and a thin adapter to them. The adapter
refuses an engine of another interface as soon as it is attached, with an error that says what
differs.
"""
