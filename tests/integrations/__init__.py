"""Tests of `fsdp_demo.integrations`."""
