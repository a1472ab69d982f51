"""The CPU kernels of mainspring, in C++. What is here is private to `mainspring.kernels.native`."""

from mainspring_native._core import *  # noqa: F403
