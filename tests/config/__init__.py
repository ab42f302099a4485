"""Tests of `fsdp_demo.config`."""
