"""Tests of `fsdp_demo.channels`."""
