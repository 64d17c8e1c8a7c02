"""Connect engines to prefixd: one module for each engine, imported when it is used.

Each has a core that knows nothing of the engine's modules, and a thin adapter to them. The adapter
refuses an engine with another interface as soon as it is attached, with an error that says what
differs.
"""
