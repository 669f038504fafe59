"""Faults at random, for as long as you like: `nox -s soak -- --minutes 10`."""
