"""How the bytes of a lane move: one data pair per lane, one direction, in order."""
