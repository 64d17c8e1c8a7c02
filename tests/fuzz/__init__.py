"""Fuzz tests: random input of every kind from outside, in random order, with Hypothesis.

The suite runs a few fixed examples. `make fuzz MINUTES=30` runs new ones. Inputs that once failed
are kept as examples of their test.
"""
