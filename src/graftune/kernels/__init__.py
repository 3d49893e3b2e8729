"""One folder for each operation. `__init__.py` has the public functions with their shape contracts; `reference.py`
states the formula in plain torch and computes on devices without a kernel; `kernel.py`, and in larger folders further
files, have the Triton kernels. Nothing here depends on a model.

Legend: T tokens, D model width, N heads, K key/value heads, H head width, F feed-forward width, R rank, V vocabulary.
"""
