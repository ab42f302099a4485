"""Tests of `fsdp_demo.hosts`."""
