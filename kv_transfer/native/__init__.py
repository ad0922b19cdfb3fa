"""The fence of shared memory in C++: what Python cannot do by itself, a full barrier between a store and a load.

Built as the kernels are (`make native`); `kv_transfer/fence.py` calls it.
"""
