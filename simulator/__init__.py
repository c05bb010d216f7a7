"""Runs ranks against the fakes, injects faults and records what happened."""
