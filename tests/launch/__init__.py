"""Tests of `fsdp_demo.launch`."""
