"""Two releases side by side: clients of one with daemons of the other, a fleet of both, and the
files of one under the other. `python -m tests.skew --help`."""
