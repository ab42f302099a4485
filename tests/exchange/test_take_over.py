"""An island without a state joins others that have one, in a plain loop."""

import torch

import fsdp_demo

from ..support import threaded


def joined(island, topology, holder):
    """Island `holder` resumes from a state of step 0, whose weights are its own."""
    torch.manual_seed(island)
    model = torch.nn.Linear(4, 4)
    own = model.weight.detach().clone()
    optimizer = torch.optim.AdamW(model.parameters())
    alone = fsdp_demo.attach(optimizer, "diloco", model=model, topology=fsdp_demo.Topology())
    state = alone.state_dict() if island == holder else None
    alone.detach()
    exchange = fsdp_demo.attach(optimizer, "diloco", model=model, topology=topology, state=state)
    exchange.detach()
    return own, model.weight.detach()


def test_take_over_donor_has_a_state(run_ranks):
    """Of islands at equal steps the one with a state is the donor."""

    def run():
        return [
            threaded.values(threaded.islands(lambda i, t, h=holder: joined(i, t, h)))
            for holder in (0, 1)
        ]

    for holder, out in enumerate(run_ranks(run, islands=1, procs=1)[0]):
        assert all(torch.equal(now, out[holder][0]) for _, now in out)
