"""Starting islands: launchers, restarts, rehearsals on one machine, the store. `python -m
fsdp_demo.launch` runs one island's launcher.

May import everything but `integrations`, `cli` and `deepspeed_ext`; `site`, which runs in the
processes of a training, may import `integrations`, too.
"""
