"""Eviction orders: who leaves a full tier. Pure; see `base` for the interface."""
