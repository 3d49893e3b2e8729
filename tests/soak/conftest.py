"""The launcher of tests/dist, and its base and data."""

from tests.dist.conftest import base, data, launcher

__all__ = ["base", "data", "launcher"]
