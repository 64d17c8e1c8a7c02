"""Engines on one side, prefixd on the other: a module an engine, imported when it is used.

Each is a core that knows nothing of its engine's modules and a thin adapter to them. An engine that
the adapter was not made for is refused when it is attached, in a sentence, and never later.
"""
