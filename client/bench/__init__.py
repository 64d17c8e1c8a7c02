"""Measurements of the real client against a daemon, beside the memcpy and the hashing that nobody
can do without. `prefixctl bench` runs them."""
