"""The native CPU kernels in C++ and how they are built (`build.py`); `workers/ops/native.py` calls them."""
