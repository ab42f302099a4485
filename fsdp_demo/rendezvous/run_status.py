"""How the islands of a run stand, asked from outside: the store says who the members are, their
listeners how far they are.

Nothing of it disturbs the run: a listener answers in the network thread, and the store is read
only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ..elastic.store_session import newest
from ..errors import counted
from ..membership.protocol_types import Member
from ..net.address import split_address
from ..peers.join_messages import Request, ask_join_server, listener_key
from ..store.client import Store

STATUS = Request(ask="status")


def members(store: Store, run: str, token: str = "") -> dict[str, Any]:
    """The members of a run, each with what the listener of its first peer group says.

    Returns:
        `run`, `attempt`; `state` ("nobody has met", "members", "left", "finished"); `epoch`;
        `members`: per island its slot, life (how often its slot was started before), and from its
        listener step messages `launched` and `delivered`, `heard` (seconds since each other island
        was heard); or `silent` where the listener does not answer.

    Raises:
        StoreSilent: no answer. ValueError: what stands there cannot be read.
    """
    attempt = store.get(f"{run}/attempt")
    found: dict[str, Any] = {
        "run": run,
        "attempt": attempt,
        "state": "nobody has met",
        "epoch": None,
        "members": [],
    }
    if not attempt:
        return found
    above = store.under(f"{run}/{attempt}")
    at = above.under(above.get("begun") or "0")
    record = newest(at)
    if record is None:
        return found
    found["state"] = (
        "finished" if above.get("finished") else "left" if above.get("ended") else "members"
    )
    found["epoch"] = record.epoch
    for member, answer in _asked(at, record.members, token):
        one: dict[str, Any] = {"slot": member.slot, "life": member.incarnation}
        found["members"].append({**one, **(answer or {"silent": True})})
    return found


def answers(at: Store, slots: Sequence[int], token: str = "") -> bool:
    """Whether any of these islands of a run (`at`: below its keys) answers at the listener of its
    first peer group.
    """
    record = newest(at)
    among = [member for member in record.members if member.slot in slots] if record else []
    return any(answer is not None for _, answer in _asked(at, among, token))


def _asked(
    at: Store, members: Iterable[Member], token: str
) -> Iterator[tuple[Member, dict[str, Any] | None]]:
    """Each member, and what the listener of its first peer group says; None: it does not answer."""
    import zmq

    from ..net.address import Keys

    keys = Keys(token, at.prefix.rstrip("/")) if token else None
    context = zmq.Context()
    try:
        for member in members:
            answer, listener = None, at.get(listener_key(member, 0))
            if listener:
                place = split_address(listener)
                answer = ask_join_server(context, keys, *place, STATUS, 3.0)
            yield member, answer
    finally:
        context.destroy(0)


def text(found: dict[str, Any]) -> str:
    """The result of `members` as lines of text."""
    head = f"run {found['run']}, attempt {found['attempt'] or '-'}: {found['state']}"
    if found["epoch"] is None:
        return head
    lines = [f"{head}; epoch {found['epoch']}, {counted(len(found['members']), 'island')}"]
    over = found["state"] == "finished"
    silent = "has ended with the run" if over else "its listener does not answer"
    for one in found["members"]:
        name = f"  island {one['slot']}" + (f" (life {one['life']})" if one["life"] else "")
        if "heard" not in one:
            lines.append(f"{name}: {silent}")
            continue
        heard = ", ".join(f"{slot} {age:.1f} s ago" for slot, age in sorted(one["heard"].items()))
        joining_island = f"; {one['joining']} joins" if one.get("joining") else ""
        lines.append(
            f"{name}: {counted(one['delivered'], 'message')} delivered, "
            f"heard {heard or 'nobody'}{joining_island}"
        )
    return "\n".join(lines)
