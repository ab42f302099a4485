"""What a training engine offers the exchange: local parameters, step hooks, inner optimizers. Other
engines name themselves here.
"""
