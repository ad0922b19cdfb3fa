"""The cache is zeroed, of its layout's dtype, and costs no memory before it is written."""

import psutil
import pytest
import torch

from kv_transfer.layout import KVLayout
from workers.runner.kv_cache import PagedKVCache


@pytest.mark.parametrize(("name", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_shape_dtype_and_zeros(name, dtype):
    cache = PagedKVCache(KVLayout(2, 3, 8, 4, name), 5)
    assert cache.data.shape == (2, 5, 2, 3, 4, 8)
    assert cache.data.dtype == dtype
    assert cache.data.is_contiguous()
    assert not cache.data.any()


def test_blocks_never_written_cost_no_memory():
    before = psutil.Process().memory_info().rss
    cache = PagedKVCache(KVLayout(30, 3, 64, 16, "fp32"), 1024)
    grown = psutil.Process().memory_info().rss - before
    assert cache.data.nbytes == 720 << 20
    assert grown < 64 << 20
    cache.data[:, 7] = 1.0
    assert float(cache.data.sum()) == 30 * 2 * 3 * 16 * 64
