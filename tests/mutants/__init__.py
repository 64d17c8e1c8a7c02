"""Mutants: small mistakes are made in the code on purpose, and the tests have to notice."""
