"""DeepSpeed (ZeRO) adapter of `fsdp_demo`. Nothing is here yet: the adapter comes in a later release."""
