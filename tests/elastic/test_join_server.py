"""What a member answers to a newcomer while it cannot let it in: the member trains on, and the
newcomer asks again.
"""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import zmq

from fsdp_demo import PeerLost
from fsdp_demo.elastic import agreement, join_server
from fsdp_demo.elastic.join_server import JoinServer
from fsdp_demo.elastic.peer_group import PeerGroup
from fsdp_demo.membership.protocol_types import Member
from fsdp_demo.net import address
from fsdp_demo.peers.header import QUESTION
from fsdp_demo.peers.join_messages import LetIn, RankStatus, Refusal, Request, ask_join_server
from fsdp_demo.peers.poller import Poller
from fsdp_demo.peers.zeromq import resolved

from ..support.elastic import Islands
from ..support.heard import heard
from ..support.inside import in_a_process

WAIT, TIMES = 15.0, 3


def in_network_thread() -> bool:
    return threading.current_thread().name == "network"


def trains_on(fault: Callable[[pytest.MonkeyPatch], None]) -> list[str]:
    """Three members train while a newcomer asks them and `fault` has come; their warnings."""
    run, end, here = Islands(3, dead=1.5, address="localhost"), threading.Event(), []
    lines = heard()

    def joins() -> None:
        try:
            here.append(run.newcomer(3, WAIT))
        finally:
            end.set()

    def trains(line: PeerGroup) -> tuple[int, ...]:
        step, asks = 0, 0.0
        while not asks:
            agreement.gather_json(line, line.slot, QUESTION, step)
            if line.slot == 0 and step == 1:
                fault(patch)
                threading.Thread(target=joins).start()
            time.sleep(0.02)
            step += 1
            asks = agreement.mean_of(line, step, float(end.is_set()))
        return line.slots

    with pytest.MonkeyPatch.context() as patch:
        run.run(trains, 2 * WAIT)
    for line in here:
        line.following.close()
    assert run.survivors() == [(0, 1, 2)] * 3 and run.expelled == [] and len(here) == 1
    return lines


@pytest.mark.parametrize("seconds", [0.0, 3.0])
@in_a_process
def test_join_server_asks_no_resolver(seconds: float) -> None:
    """Members that have a host name let a newcomer in while the resolver fails, or takes longer
    than ISLAND_DEAD: they asked it once, when they came.
    """

    def fault(patch: pytest.MonkeyPatch) -> None:
        plain = socket.getaddrinfo

        def asked(*args: Any, **named: Any) -> Any:
            if not in_network_thread():  # the newcomer's own question
                return plain(*args, **named)
            time.sleep(seconds)
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

        patch.setattr(socket, "getaddrinfo", asked)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(address, "STRETCH", 2)
        lines = trains_on(fault)
    assert not [line for line in lines if "lost" in line or "silent" in line], lines


@pytest.mark.parametrize("lacks", ["port", "descriptor"])
@in_a_process
def test_join_server_without_room_lets_in_later(lacks: str) -> None:
    """A member that has no port or no descriptor left says so and trains on, and the newcomer is
    let in once it has one; what was opened for it before is closed.
    """

    def fault(patch: pytest.MonkeyPatch) -> None:
        add, bind, calls = Poller.add, join_server.bound, []

        def failing(plain: Any, error: Exception, *args: Any) -> Any:
            calls.append(0)
            if in_network_thread() and len(calls) % 2 == 0 and len(calls) <= 2 * TIMES:
                raise error  # the first one of a newcomer stands
            return plain(*args)

        if lacks == "port":
            error = PeerLost("island 0 cannot listen on 127.0.0.1: Address already in use")
            patch.setattr(join_server, "bound", lambda *args: failing(bind, error, *args))
        else:
            full = zmq.ZMQError(errno.EMFILE)
            patch.setattr(Poller, "add", lambda *args: failing(add, full, *args))

    lines = trains_on(fault)
    assert [line for line in lines if "lets nobody in for now" in line], lines


def test_join_server_closes_what_a_refused_newcomer_got(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was opened for a newcomer is closed where the rest cannot be opened."""
    poller, calls = Poller(), list[int]()
    server = JoinServer.__new__(JoinServer)
    server._poller, server._prefix, server._peer_group, server._me = poller, "p", 0, Member(0)

    def bound(*args: Any) -> str:
        calls.append(0)
        if len(calls) == 3:
            raise PeerLost("no port")
        return "tcp://127.0.0.1:1"

    monkeypatch.setattr(join_server, "bound", bound)
    monkeypatch.setattr(join_server, "num_connections", lambda others: 1)
    server.loop = server._host = server._label = server.joining_island = None
    server.loop = type("Loop", (), {"detector": type("D", (), {"connections": {}})})()
    try:
        with pytest.raises(PeerLost, match="no port"):
            poller.run(lambda: server._let_in(Member(1), "island1"))
        assert poller.wires == [] and server.joining_island is None
    finally:
        poller.close(0)


ANSWERS = [
    (LetIn([1, 2, 3, 4]), '{"type":"let in","ports":[1,2,3,4]}'),
    (Refusal("busy"), '{"type":"refused","why":"busy","final":false}'),
    (RankStatus(5, 4, "running", {"1": 0.5}, ""),
        '{"type":"status","launched":5,"delivered":4,"state":"running","heard":{"1":0.5},'
        '"joining":""}'),
]  # fmt: skip
"""An answer of each kind, and its bytes: a change here is a new wire version."""

NO_ANSWERS = [
    *("", "{", "[" * 60_000, "[]", "7", "{}", '{"type":"other"}', '{"type":"refused","why":7}'),
    *('{"type":"let in"}', '{"type":"refused","why":"\\ud800"}'),
    *(f'{{"type":"let in","ports":[{n}]}}' for n in ("1,2,3", "0,1,2,3", "1,2,3,65536")),
    f'{{"type":"let in","ports":{[*range(1, 2000)]}}}',
]


def test_ask_join_server_takes_answers_only() -> None:
    """The bytes of an answer are frozen. What is none is as if nobody had answered, and costs no
    connections.
    """
    context, given = zmq.Context(), [text for _, text in ANSWERS] + NO_ANSWERS
    listener = context.socket(zmq.ROUTER)
    port = listener.bind_to_random_port("tcp://127.0.0.1")

    def answers() -> None:
        for text in given:
            who, _ = listener.recv_multipart()
            listener.send_multipart([who, text.encode()])

    thread = threading.Thread(target=answers, daemon=True)
    thread.start()
    try:
        found = [ask_join_server(context, None, "127.0.0.1", port, Request(), WAIT) for _ in given]
    finally:
        thread.join(WAIT)
        listener.close(0)
        context.term()
    assert found == [answer for answer, _ in ANSWERS] + [None] * len(NO_ANSWERS)
    assert [msgspec.json.encode(answer).decode() for answer, _ in ANSWERS] == given[: len(ANSWERS)]


@pytest.mark.parametrize(
    "request_",
    [
        *(b"", b"{", b"[" * 60_000, b"7", b"\xff", b'{"slot": "x"}', b'{"slot": 1e999}'),
        *(b'{"run": "\\ud800"}', b'{"run": "\xff"}', b'{"name": {}}', b'{"run": "another"}'),
    ],
    ids=lambda data: data[:16].decode(errors="replace"),
)
def test_join_server_refuses_what_is_no_request(request_: bytes) -> None:
    """What is no request to this peer group is refused for good, by an answer that can be sent."""
    server = JoinServer.__new__(JoinServer)
    server._prefix, server._peer_group = "p", 0
    answer = server._answer(request_)
    assert isinstance(answer, Refusal) and answer.final and len(msgspec.json.encode(answer)) < 1000


def test_resolved_names_what_has_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host name that does not resolve at the start is an error with the name of the variable."""

    def asked(*args: Any, **named: Any) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", asked)
    with pytest.raises(PeerLost, match=r"cannot listen on nowhere.example \(ISLAND_ADDRESS\)"):
        resolved("nowhere.example")
