"""Fuzz: what may come from outside, in random forms and orders, with Hypothesis.

Seconds of it are in the suite, the same examples each time. `make fuzz MINUTES=30` goes on with
others. What was found once stays as an example, beside the test that found it.
"""
