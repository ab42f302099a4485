"""Tests of `deepspeed_ext`."""
