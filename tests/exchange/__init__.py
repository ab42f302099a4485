"""Tests of `fsdp_demo.exchange`."""
