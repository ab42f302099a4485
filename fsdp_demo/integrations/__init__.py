"""Adapters to training frameworks, one module or package each. `fsdp_demo` itself imports torch
only, so import these by name.

May import everything but `launch`, `cli` and `deepspeed_ext`.
"""
