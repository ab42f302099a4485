"""A connection that is reset while more has come than its owner reads: what a process finds that
was stopped until the others went on.
"""

from __future__ import annotations

import time

import zmq

from ..support.inside import in_a_process
from ..support.relay import Relay

LONG = 20.0
"""Seconds, longer than `tcp.NAT`: a heartbeat of the library's own would come within."""


def flooded(port: int, kind: int, message: bytes) -> None:
    """Send far more than is read there, and reset the connection."""
    relay, context = Relay(port), zmq.Context()
    sender = context.socket(kind)
    sender.linger, sender.sndhwm = 0, 1000
    sender.connect(f"tcp://127.0.0.1:{relay.port}")
    for _ in range(40):
        sender.send(message)
    end, before = time.monotonic() + LONG, -1
    while relay.forth != before and time.monotonic() < end:  # until no more fits
        before = relay.forth
        time.sleep(0.3)
    assert relay.forth
    relay.cut(reset=True)
    sender.close()
    context.term()
    relay.close()


@in_a_process
def test_connection_reset_with_unread_data_does_not_abort() -> None:
    """A connection that is reset behind unread data does not abort the process. (The heartbeat of
    libzmq did: `Assertion failed: !_io_error`. Here it would come after a second.)
    """
    from fsdp_demo.net import tcp
    from fsdp_demo.peers import poller as hubs

    for module in (hubs, tcp):
        if hasattr(module, "NAT"):
            module.NAT = 1  # type: ignore[attr-defined]
    poller = hubs.Poller()
    made = poller.socket()
    made.bind("tcp://127.0.0.1:*")
    port = int(made.last_endpoint.decode().rstrip("\0").rpartition(":")[2])
    flooded(port, zmq.PAIR, bytes(100_000))
    time.sleep(1.5)
    came = 0
    while made.poll(100):
        came += len(made.recv())
    made.close()
    poller.close(0)
    assert came >= 100_000


@in_a_process
def test_store_reset_with_unread_data_does_not_abort() -> None:
    """The store lives on when such a connection of a client is reset."""
    from fsdp_demo.net import tcp
    from fsdp_demo.store import server as durable_store
    from fsdp_demo.store.connection import Question, pack

    for module in (durable_store, tcp):
        for name in ("SIGN", "NAT"):
            if hasattr(module, name):
                setattr(module, name, 1)
    store = durable_store.StoreServer("127.0.0.1:0", ":memory:")
    question = Question("set", 1, bytes(16), bytes(16), ["key"], ["x" * 100_000])
    flooded(store.port, zmq.DEALER, pack(question))
    time.sleep(1.5)
    end = time.monotonic() + 0.5
    store.serve_while(lambda: time.monotonic() < end)


@in_a_process
def test_poller_sockets_have_no_zmq_heartbeat() -> None:
    """Sockets of a poller have no heartbeat of libzmq, and keepalive of TCP."""
    from fsdp_demo.peers.poller import Poller

    poller = Poller()
    made = poller.socket()
    found = made.heartbeat_ivl, made.tcp_keepalive, made.tcp_keepalive_idle
    made.close()
    poller.close(0)
    assert found == (0, 1, 15)
