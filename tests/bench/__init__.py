"""Measurements: `make bench-engine`. A bench measures and prints; a test asserts."""
