"""The engine: which tokens of which requests run in the next step, and over which KV blocks. Pure; the simulator runs
it.
"""
