"""The commands of `fsdp-demo`, one module each."""
