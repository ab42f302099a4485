"""The one place that knows the version of this project (packaging, `fsdp_demo.__version__` and the
CLI read it here).
"""

__version__ = "0.1.0"
