"""Tests of `fsdp_demo.comm`."""
