"""The store: three verbs, answers that are on the disk before they are given, and nobody who harms
it.
"""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch.distributed as dist
import zmq

from fsdp_demo.errors import PeerLost, StoreSilent, WireError
from fsdp_demo.store import client
from fsdp_demo.store.client import NotAllCame, StoreClient, WorldStore, connect
from fsdp_demo.store.connection import (
    LARGEST,
    LARGEST_MESSAGE,
    LONGEST,
    Answer,
    Question,
    pack,
    read_answer,
    read_question,
)
from fsdp_demo.store.records import Records

from ..support.durable import TOKEN, Durable
from ..support.inside import in_a_process
from ..support.refused import refusal
from ..support.relay import Relay
from ..support.threaded import at_once

# ---- what it answers ---------------------------------------------------------------------------


def conversation(store: Any) -> list[Any]:
    """Every verb in every situation, and what is answered."""
    said = [store.get("a"), store.compare_set("a", "x", "y"), store.get("a")]
    said += [store.compare_set("a", "", "z"), store.get("a"), store.compare_set("a", "", "q")]
    said += [store.compare_set("a", "z", "w"), store.get("a")]
    said += [store.set("a", "ä\0\n"), store.get("a"), store.set("a", ""), store.get("a")]
    said += [store.compare_set("a", "", "anew"), store.get_all(["a", "none", "a"])]
    said += [store.set("large", "x" * LARGEST), len(store.get("large")), store.get_all([])]
    return said


@in_a_process
def test_store_verbs_are_answered_alike_by_both_stores(tmp_path: Path) -> None:
    """The store and the store of a world answer the three verbs alike."""
    wanted = ["", None, "", "z", "z", "z", "w", "w", None, "ä\0\n", None, "", "anew"]
    wanted += [["anew", "", "anew"], None, LARGEST, []]
    stores = [
        WorldStore(dist.HashStore(), "here", 10.0),
        Durable().client(),
        Durable(tmp_path / "keys").client(),
        Durable(token=TOKEN).client(),
    ]
    for said in [conversation(store.under("run")) for store in stores]:
        said[1] = None  # of a key that is not there torch's store gives what was expected
        assert said == wanted


def test_store_gather_waits_for_all_and_names_the_missing() -> None:
    """Notes come back by number once all are there, or those who wait need no more. In vain, the
    error names who came and who is missing; a note that cannot be read is named at once.
    """
    at = WorldStore(dist.HashStore(), "the test", 5.0).under("run")
    kept = {"what": "3 notes", "label": lambda i, note: f"{i}{note or ''}", "cure": ". Write them"}
    at.set("n/2", "22")
    with pytest.raises(PeerLost) as error:
        at.gather("n", (0, 1, 2), int, 0.1, **kept)
    text = "waited 0.1 s for 3 notes: came 222; missing 0, 1. Write them"
    assert isinstance(error.value, NotAllCame) and str(error.value) == text
    enough = at.gather("n", (0, 1, 2), int, 60.0, "", look=lambda notes, missing: missing[2:])
    assert enough == {2: 22}
    late = threading.Timer(0.2, lambda: (at.set("n/1", "11"), at.set("n/0", "0")))
    late.start()
    looks = list[tuple[list[int], list[int]]]()

    def look(notes: dict[int, int], missing: list[int]) -> list[int]:
        looks.append((list(notes), missing))
        return missing

    found = at.gather("n", (0, 1, 2), int, 60.0, "", look=look)
    assert list(found.items()) == [(0, 0), (1, 11), (2, 22)]
    assert looks[0] == ([2], [0, 1]) and looks[-1] == ([0, 1, 2], [])
    late.join()
    for note in ("{", "[" * 60_000, '"7"', "7e400"):
        at.set("n/1", note)
        with pytest.raises(ValueError, match="the note run/n/1 of rank 1 in the store at the test"):
            at.gather("n", (0, 1, 2), int, 60.0, "", kind="rank")


@in_a_process
def test_store_client_serves_threads_and_forks() -> None:
    """Threads and forked processes share a client."""
    store = Durable().client()
    store.set("first", "x")

    def work(name: str) -> None:
        for n in range(25):
            store.set(f"{name}/{n}", name)

    names = ["t0", "t1", "t2", "t3", "fork"]
    pid = os.fork()  # before there are threads
    if not pid:
        work("fork")
        os._exit(0)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, names[:4]))
    assert os.waitpid(pid, 0)[1] == 0
    assert store.get_all([f"{x}/{n}" for x in names for n in range(25)]) == [
        x for x in names for _ in range(25)
    ]


# ---- on the disk, and once ---------------------------------------------------------------------


@in_a_process
def test_store_keeps_what_was_answered_after_a_kill(tmp_path: Path) -> None:
    """What the store has answered is there after it was killed and started again."""
    store = Durable(tmp_path / "keys")
    client = store.client()
    first = client.identity()
    for n in range(20):
        client.set(f"set/{n}", str(n))
    client.compare_set("once", "", "me")
    client.set("gone", "x")
    client.set("gone", "")
    store.kill()
    store.start()
    assert [client.get(f"set/{n}") for n in range(20)] == [str(n) for n in range(20)]
    assert client.compare_set("once", "", "you") == "me" and client.get("gone") == ""
    now = client.identity()
    assert (now.name, first.generation, now.generation) == (first.name, 1, 2)


@in_a_process
def test_store_made_anew_is_noticed(tmp_path: Path) -> None:
    """A store that was made anew is noticed before it is changed."""
    store = Durable(tmp_path / "keys")
    client = store.client(5.0)
    client.set("epoch", "8")
    store.kill()
    for file in tmp_path.glob("keys*"):
        file.unlink()
    store.start()
    said = "was made anew since, without what it held before"
    refusal(lambda: client.compare_set("epoch", "", "8"), said, kind=StoreSilent)
    refusal(lambda: client.get("epoch"), said, kind=StoreSilent)
    refusal(client.identity, said, kind=StoreSilent)
    anew = store.client()
    assert (anew.get("epoch"), anew.identity().generation) == ("", 1)


@in_a_process
def test_store_compare_set_with_a_lost_answer(tmp_path: Path) -> None:
    """A compare_set whose answer was lost knows its own success. The relay holds what comes back,
    then all is cut, and the client comes by another way.
    """
    store = Durable(tmp_path / "keys")
    watch = store.client()
    for restart in (False, True):
        relay = Relay(store.port)
        client = store.client(20.0, port=relay.port)
        client.get("k")
        relay.hold(forth=False)
        key = f"slot/{restart}"
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(client.compare_set, key, "", "me")
            while not watch.get(key):  # it has been made
                time.sleep(0.01)
            if restart:
                store.kill()
                store.start()
            relay.cut(reset=True)
            client._line._place = client._line._place._replace(port=store.port)
            assert answer.result() == "me"
        assert (watch.get(key), watch.compare_set(key, "", "you")) == ("me", "me")
        relay.close()


def question(
    verb: Any, records: Records, number: int, *words: str, client: bytes = b"c" * 16
) -> Question:
    keys = list(words) if verb == "get" else list(words[:1])
    return Question(verb, number, client, records.name, keys, list(words[len(keys) :]))


def said(records: Records, asked: Question) -> list[str]:
    (answer,) = records.answer([asked])
    assert answer is not None and answer.status == "done", answer
    return answer.values


def test_store_old_copy_of_a_question_does_not_act(tmp_path: Path) -> None:
    """An old copy of a question does not act: it took longer than the questions after it, and
    somebody else has changed the key since.
    """
    records = Records(tmp_path / "keys")
    lose = question("compare_set", records, 1, "k", "old", "new")
    assert said(records, lose) == [""]
    old = question("set", records, 2, "k", "old")
    said(records, old)
    said(records, question("get", records, 3, "k"))
    said(records, question("set", records, 1, "k", "theirs", client=b"d" * 16))
    assert records.answer([lose, old]) == [None, None]
    assert said(records, question("get", records, 4, "k")) == ["theirs"]
    records.close()


def test_store_get_all_finds_many_keys_and_writes_nothing(tmp_path: Path) -> None:
    """One question finds many keys and writes nothing. One answer has room for 1 MiB of values, and
    for one value at least.
    """
    records = Records(tmp_path / "keys")
    values = {"a": "1" * (LARGEST // 2), "b": "2" * (LARGEST // 2), "c": "3"}
    for number, (key, value) in enumerate(values.items(), 1):
        said(records, question("set", records, number, key, value))
    found = said(records, question("get", records, 9, "nothing", "a", "b", "c"))
    assert found == ["", values["a"], values["b"]]
    assert said(records, question("get", records, 10, "c", "nothing")) == ["3", ""]
    assert records._held == len(values)
    records.close()


@in_a_process
def test_store_client_get_all_asks_until_all_are_there() -> None:
    """A client finds all keys, whatever fits in one answer."""
    client = Durable().client()
    values = {f"k{n}": chr(97 + n % 26) * (n % 7 * 100_000) for n in range(40)}
    for key, value in values.items():
        client.set(key, value)
    keys = [*values, "nothing", *reversed(values)]
    assert client.get_all(keys) == [values.get(key, "") for key in keys]


@in_a_process
def test_store_compare_set_race_has_one_winner(tmp_path: Path) -> None:
    """Of two clients that race for a key one wins."""
    store = Durable(tmp_path / "keys")
    found: list[list[str]] = [[], [], []]

    def race(n: int) -> None:
        client = store.client()
        for epoch in range(30):
            found[n].append(client.compare_set(f"epoch/{epoch}", "", str(n)))

    at_once(race, 3, 60.0)
    one, two, three = found
    assert len(one) == 30 and one == two == three and set(one) <= {"0", "1", "2"}


# ---- a store that stands still or ends ---------------------------------------------------------


@in_a_process
def test_store_frozen_is_silent_and_answers_again(tmp_path: Path) -> None:
    """A frozen store is an error within the deadline, and answers again when it goes on."""
    store = Durable(tmp_path / "keys")
    at = store.client(1.2).under("run")
    at.set("k", "v")
    store.freeze()
    began = time.monotonic()
    refusal(lambda: at.set("n", "1"), "does not answer within 1.2 s", kind=StoreSilent)
    assert 1.0 < time.monotonic() - began < 5.0
    store.wake()
    at.deadline = 10.0
    at.set("n", "2")
    # what was not answered has happened or not, and happens no more
    assert at.get("k") == "v" and at.get("n") == "2"


@in_a_process
def test_store_dead_cable_is_silence() -> None:
    """A dead cable is reported as silence within the deadline."""
    store = Durable()
    relay = Relay(store.port)
    client = store.client(0.5, port=relay.port)
    client.set("k", "v")
    relay.hold()
    with pytest.raises(StoreSilent):
        client.get("k")
    relay.let_go()
    assert client.within(10.0).get("k") == "v"
    relay.close()


@in_a_process
def test_store_absent_wait_is_bounded(tmp_path: Path) -> None:
    """A caller that can do without the store waits no longer than it said, and asks it again as
    soon as it is there, on the same client.
    """
    store = Durable(tmp_path / "keys")
    client = store.client()
    client.set("k", "v")
    store.kill()
    client.deadline, client.absent = 20.0, 0.3
    absent = "is not there (nobody listens, for 0.3 s)"
    refusal(lambda: client.get("k"), absent, kind=StoreSilent)
    store.start()
    assert client.get("k") == "v"


# ---- bounds ------------------------------------------------------------------------------------


@in_a_process
def test_store_keys_and_values_are_bounded() -> None:
    """Keys and values beyond their bounds are refused by client and store."""
    client, long = Durable(keys=3, room=1 << 20).client(), "x" * (LARGEST + 1)
    client.set("text", "1")
    client.set("sum", "2")
    client.set("k" * LONGEST, "3")
    refusal(lambda: client.set("k", long), f"{LARGEST + 1} bytes, allowed are {LARGEST}")
    refusal(lambda: client.compare_set("k", "", long), f"{LARGEST + 1} bytes, allowed are")
    refusal(lambda: client.set("", "x"), "0 bytes, allowed are 1 to 512")
    refusal(lambda: client.get("k" * (LONGEST + 1)), "513 bytes, allowed")
    refusal(lambda: client.set("fourth", "x"), "holds 3 keys, and no more")
    client.set("text", "")
    client.set("fourth", "4")
    assert client.get_all(["text", "fourth", "sum"]) == ["", "4", "2"]


@in_a_process
def test_store_full_disk_is_said(tmp_path: Path) -> None:
    """A full disk is an error of the question, and nothing else is lost."""
    client = Durable(tmp_path / "keys", room=5 * LARGEST).client()
    client.set("first", "kept")
    with pytest.raises(StoreSilent, match="cannot write its file: database or disk is full"):
        for n in range(9):
            client.set(f"large{n}", "x" * LARGEST)
    client.set("large0", "")
    client.set("small", "fits")
    assert client.get_all(["first", "small"]) == ["kept", "fits"]


def test_store_failed_question_leaves_the_others(tmp_path: Path) -> None:
    """A question that fails does not take those beside it along."""
    records = Records(tmp_path / "keys", room=3 * LARGEST)
    clients = [bytes([n]) * 16 for n in range(6)]
    asked = [
        question("set", records, 1, f"k{n}", "x" * (LARGEST if 2 <= n <= 4 else 9), client=c)
        for n, c in enumerate(clients)
    ]
    statuses = [answer.status for answer in records.answer(asked) if answer is not None]
    assert statuses.count("done") >= 4 and "failed" in statuses and statuses[5] == "done"
    held = [said(records, question("get", records, 9, f"k{n}")) for n in range(6)]
    assert [bool(value) for (value,) in held] == [status == "done" for status in statuses]
    records.close()


def test_store_refuses_a_foreign_or_open_file(tmp_path: Path) -> None:
    """A file that is no store's, or is open elsewhere, is refused."""
    import sqlite3

    (tmp_path / "text").write_text("no database at all, but long enough to be looked at" * 20)
    other = sqlite3.connect(tmp_path / "other")
    other.execute("CREATE TABLE mine (x)")
    other.commit()
    other.close()
    held = Records(tmp_path / "held")
    wrong = {
        "text": "no store's file",
        "other": "is no store's file",
        "held": "another store has it open",
        "no/keys": "folder that exists",
    }
    for name, says in wrong.items():
        with pytest.raises(ValueError, match=f"--file .*{says}"):
            Records(tmp_path / name)
    held.close()
    again = Records(tmp_path / "held")
    assert again.generation == 2 and (tmp_path / "held").stat().st_mode & 0o077 == 0
    again.close()


# ---- tokens and strangers ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("there", "here"), [(TOKEN, "another token, as long"), (TOKEN, ""), ("", TOKEN)]
)
@in_a_process
def test_store_token_wrong_is_named(there: str, here: str) -> None:
    """A token that is not the store's is named by the error."""
    store = Durable(token=there)
    said = f"ISLAND_TOKEN is {'' if here else 'not '}set here, and must be the same at the store"
    refusal(lambda: store.client(20.0, here).set("k", "v"), said)
    assert not store.client().get("k")


@in_a_process
def test_store_token_short_is_refused() -> None:
    """A short token is refused, and the client can be closed: a socket that was left over once held
    the context at its end, for ever.
    """
    with pytest.raises(ValueError, match="ISLAND_TOKEN has 5 characters"):
        connect(Durable(token=TOKEN).endpoint, 5.0, 5.0, "short")


@in_a_process
def test_store_tunnel_without_a_store_is_no_wrong_token() -> None:
    """A tunnel without a store behind it is no wrong token: it takes connections and closes them,
    and the store may come yet.
    """
    server = socket.create_server(("127.0.0.1", 0))

    def close_all() -> None:
        while True:
            server.accept()[0].close()

    threading.Thread(target=close_all, daemon=True).start()
    closes = r"does not answer within 1\.5 s \(it closes the connection\)"
    with pytest.raises(StoreSilent, match=closes):
        StoreClient(f"127.0.0.1:{server.getsockname()[1]}", TOKEN, 1.5).get("k")


@in_a_process
def test_store_port_garbage_does_no_harm() -> None:
    """Garbage on the port does the store no harm."""
    store, rng = Durable(), random.Random(0)
    client = store.client()
    client.set("k", "v")
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + b"\x00" + bytes(31)
    ends = [socket.create_connection(("127.0.0.1", store.port)) for _ in range(40)]
    for n, end in enumerate(ends):
        end.sendall((greeting if n % 2 else b"") + rng.randbytes(rng.randrange(400)))
    context = zmq.Context()
    rude = context.socket(zmq.DEALER)
    rude.linger = 0
    rude.connect(f"tcp://127.0.0.1:{store.port}")
    good = pack(Question("set", 1, b"r" * 16, b"", ["k"], ["theirs"]))
    wrong = [b"", b"x", rng.randbytes(200), good[:-1], good + b"x", good[:4] + b"\x09" + good[5:]]
    for data in (*wrong, good, b"x" * (LARGEST_MESSAGE + 1)):
        rude.send(data)
    rude.send_multipart([b"a", b"b"])
    assert client.get("k") == "v"
    for end in ends:
        end.close()
    context.destroy(0)
    assert client.get("k") == store.client().get("k") == "v"


@pytest.mark.parametrize("token", ["", TOKEN])
@in_a_process
def test_store_connection_without_handshake_is_closed(token: str) -> None:
    """A connection without a handshake is closed, whether it says nothing or stops in the middle of
    its greeting.
    """
    store = Durable(token=token)
    idle = [socket.create_connection(("127.0.0.1", store.port), timeout=15) for _ in range(20)]
    for begun in idle[::2]:
        begun.sendall(b"\xff" + bytes(8))
    for one in idle:
        while one.recv(64):  # its own greeting, then the end; a timeout where it keeps it
            pass
    store.client().set("key", "value")


@in_a_process
def test_store_question_number_beyond_the_bound_is_refused() -> None:
    """A question with a number beyond the bound is refused and harms nobody."""
    store = Durable()
    client = zmq.Context().socket(zmq.DEALER)
    client.linger = 0
    client.connect(f"tcp://127.0.0.1:{store.port}")
    client.send(pack(Question("hello", 1, b"a" * 16)))
    name = bytes.fromhex(read_answer(client.recv()).values[0])
    client.send(pack(Question("set", 2**63, b"b" * 16, name, ["k"], ["v"])))
    assert client.poll(10_000), "the store does not answer"
    answer = read_answer(client.recv())
    assert answer.status == "refused" and "cannot be read" in answer.text
    client.send(pack(Question("set", 2**63 - 1, b"b" * 16, name, ["k"], ["v"])))
    assert read_answer(client.recv()).status == "done"
    client.close(0)
    assert store.client().get("k") == "v"


@in_a_process
def test_store_of_another_release_is_refused() -> None:
    """A store of another release is refused by an error that says so."""
    from fsdp_demo.store import connection

    store = Durable()
    there = connection.pack
    connection.pack = lambda message: there(message).replace(b"FDSQ3", b"FDSQ4")
    refusal(lambda: store.client().get("k"), "refuses: a message of the store cannot be read")


@pytest.mark.parametrize("libuv", [True, False])
@in_a_process
def test_store_of_torch_is_refused(libuv: bool) -> None:
    """A TCPStore of torch is recognised and refused in one line."""
    theirs = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False, use_libuv=libuv)
    endpoint = f"127.0.0.1:{theirs.port}"
    text = refusal(
        lambda: connect(endpoint, 20.0, 5.0),
        f"a store of torch.distributed answers at ISLAND_ENDPOINT={endpoint}",
        f"start there `fsdp-demo store --bind {endpoint}`",
    )
    assert "\n" not in text


def test_store_messages_read_back() -> None:
    """Questions and answers read back from their bytes, and torn ones do not."""
    asked = Question("compare_set", 2**40, b"c" * 16, b"s" * 16, ["key"], ["", "x" * 7000])
    answered = Answer("done", 2**40, ["value"])
    assert read_question(pack(asked)) == asked and read_answer(pack(answered)) == answered
    for read, data in (
        (read_question, pack(msgspec.structs.replace(asked, values=["e", "d"]))),
        (read_answer, pack(answered)),
    ):
        for size in range(len(data)):
            with pytest.raises(WireError):
                read(data[:size])


@pytest.mark.parametrize(
    "changes",
    [
        {"verb": "add"},
        {"number": -1},
        {"number": 2**63},
        {"client": bytes(17)},
        {"keys": []},
        {"keys": [""]},
        {"keys": ["k" * (LONGEST + 1)]},
        {"keys": ["k"] * 2},
        {"values": ["v"]},
        {"values": ["v", "x" * (LARGEST + 1)]},
        {"values": ["v"] * 3},
        {"verb": "get", "keys": ["k"] * 1025, "values": []},
    ],
)
def test_store_messages_beyond_their_bounds_are_refused(changes: dict[str, Any]) -> None:
    """Questions beyond their bounds are refused."""
    good = Question("compare_set", 1, b"c" * 16, b"s" * 16, ["key"], ["", "x"])
    with pytest.raises(WireError):
        read_question(pack(msgspec.structs.replace(good, **changes)))


def test_store_absent_is_told_while_it_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The log says once that no store answers, long before the wait is over."""
    monkeypatch.setattr(client, "NOTICE", 0.2)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
        with pytest.raises(StoreSilent, match="no store answers"):
            connect(endpoint, 1.2, 1.0)
    (line,) = [r.getMessage() for r in caplog.records]
    assert line.startswith(f"no store answers at ISLAND_ENDPOINT={endpoint} so far (")
    assert "this rank waits" in line and f"fsdp-demo store --bind {endpoint}" in line
    assert line.endswith("(docs/troubleshooting.md#no-store)")
