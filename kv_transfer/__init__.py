"""Moves the KV cache of one paged pool into another; knows nothing of requests, HTTP or Ray."""
