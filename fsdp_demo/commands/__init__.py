"""The commands of `fsdp-demo`: one module each, with `add`, which makes its parser."""
