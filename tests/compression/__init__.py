"""Tests of `fsdp_demo.compression`."""
