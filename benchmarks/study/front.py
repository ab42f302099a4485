"""The cells of the table `front`: loss over bytes."""

from __future__ import annotations

from study.cells import Cell
from study.methods import MUON, demo, diloco, full, muloco, sign_loco, sparse_loco, with_feedback

LOCAL = [Cell(f"local_sgd H={p}", "local_sgd", {"period": p}, 1.4e-3) for p in (5, 20)]
FRONT = [
    full(),
    full(" muon", 4.5e-2, **MUON),
    *LOCAL,
    *(diloco(period=h) for h in (5, 20, 40)),
    diloco(" 4 bits", value_dtype="int4"),
    *(sign_loco(period=h) for h in (1, 2, 5, 10, 20)),
    *(sign_loco(period=h, topk=32) for h in (5, 10, 20, 40)),
    *(sign_loco(topk=k) for k in (11, 256, 768)),
    *(
        sign_loco(f" {bits}", topk=k, value_dtype=bits)
        for bits, k in (("2bit", 80), ("int4", 64), ("int8", 44), ("bf16", 28))
    ),
    sign_loco(" without momentum", momentum=0.0),
    *(with_feedback(period=h) for h in (5, 10, 20)),
    with_feedback(topk=256),
    *(sparse_loco(period=h, topk=k) for h, k in ((1, 6), (2, 13), (5, 32), (10, 64), (20, 128))),
    *(demo(f" k={k}", 1.4e-3, topk=k, beta=0.95) for k in (32, 8)),
    *(muloco(period=h) for h in (5, 10, 20, 40)),
    *(muloco(" 1 bit", period=h, value_dtype="1bit") for h in (2, 5, 10, 20)),
]
