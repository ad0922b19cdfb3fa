"""Grids of fewer bits: a dense weight to numbers and back, and how checkpoints store them. Plain torch; knows no model
and no kernel."""
