"""The commands of `fsdp-demo`, a module each."""
