"""How the islands of a run stand, asked from outside: the store says who the members are, their
listeners how far they are.

Nothing of it disturbs the run: a listener answers in the network thread, and the store is read
only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..elastic.store_session import newest
from ..errors import counted
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
    import zmq

    from ..net.address import Keys

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
    prefix = f"{run}/{attempt}/{above.get('begun') or 0}"
    at = store.under(prefix)
    record = newest(at)
    if record is None:
        return found
    found["state"] = (
        "finished" if above.get("finished") else "left" if above.get("ended") else "members"
    )
    found["epoch"] = record.epoch
    keys, context = Keys(token, prefix) if token else None, zmq.Context()
    try:
        for member in record.members:
            one: dict[str, Any] = {"slot": member.slot, "life": member.incarnation}
            listener = at.get(listener_key(member, 0))
            answer = None
            if listener:
                host, port = split_address(listener)
                answer = ask_join_server(context, keys, host, port, STATUS, 3.0)
            found["members"].append({**one, **(answer or {"silent": True})})
    finally:
        context.destroy(0)
    return found


def answers(at: Store, slots: Sequence[int], token: str = "") -> bool:
    """Whether any of these islands of a run (`at`: below its keys) answers at the listener of its
    first peer group.
    """
    import zmq

    from ..net.address import Keys

    record = newest(at)
    keys, context = Keys(token, at.prefix.rstrip("/")) if token else None, zmq.Context()
    try:
        for member in record.members if record is not None else ():
            listener = at.get(listener_key(member, 0)) if member.slot in slots else ""
            if (
                listener
                and ask_join_server(context, keys, *split_address(listener), STATUS, 3.0)
                is not None
            ):
                return True
        return False
    finally:
        context.destroy(0)


def text(found: dict[str, Any]) -> str:
    """The same for people."""
    head = f"run {found['run']}, attempt {found['attempt'] or '-'}: {found['state']}"
    if found["epoch"] is None:
        return head
    lines = [f"{head}; epoch {found['epoch']}, {counted(len(found['members']), 'island')}"]
    for one in found["members"]:
        name = f"  island {one['slot']}" + (f" (life {one['life']})" if one["life"] else "")
        if "heard" not in one:
            lines.append(f"{name}: its listener does not answer")
            continue
        heard = ", ".join(f"{slot} {age:.1f} s ago" for slot, age in sorted(one["heard"].items()))
        joining_island = f"; {one['joining']} joins" if one.get("joining") else ""
        lines.append(
            f"{name}: {counted(one['delivered'], 'message')} delivered, "
            f"heard {heard or 'nobody'}{joining_island}"
        )
    return "\n".join(lines)
