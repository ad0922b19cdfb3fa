"""Round-to-nearest grids: a dense weight to fewer bits and back. Plain torch; knows no model and no kernel."""
