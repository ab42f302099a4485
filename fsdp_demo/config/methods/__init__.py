"""Methods by family: short functions that return an `ExchangeConfig`. `presets.py` names them."""
