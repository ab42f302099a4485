"""Joints to trainers: one module per framework. `fsdp_demo` itself imports torch only, so import these by name."""
