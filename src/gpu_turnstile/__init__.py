"""gpu-turnstile: one GPU, many workloads, one gate."""

from importlib.metadata import version as _version

__version__ = _version("gpu-turnstile")
