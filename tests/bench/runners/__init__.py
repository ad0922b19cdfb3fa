"""One program per engine, each run by the interpreter of that engine's own environment: they import nothing of ours but
`lines.py` beside them (Baton's imports Baton).
"""
