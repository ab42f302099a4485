"""Tests of `fsdp_demo.checkpoint`."""
