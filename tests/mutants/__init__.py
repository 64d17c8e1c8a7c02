"""Mutants: small mistakes are planted in the code, and the tests have to notice them."""
