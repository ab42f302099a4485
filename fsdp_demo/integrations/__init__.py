"""Joints to trainers: one module or package per framework. `fsdp_demo` itself imports torch only,
so import these by name.

May import everything but `launch`, `cli` and `deepspeed_ext`.
"""
