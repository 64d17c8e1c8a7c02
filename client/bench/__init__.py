"""Measurements of the real client against a daemon, beside the memcpy and the hashing that any
cache needs. `prefixctl bench` runs them."""
