"""The commands of `fsdp-demo`: their flags, and the calls behind them."""
