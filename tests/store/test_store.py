"""The store: three verbs, answers that are on the disk before they are given, and nobody who harms
it.
"""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch.distributed as dist

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
from ..support.relay import Relay

zmq = pytest.importorskip("zmq")


def alone(run_ranks: Any, fn: Any) -> Any:
    """`fn(folder)` in a process of its own, which may fork."""
    return run_ranks(lambda me: fn(me.folder), 1, 1)[0]


# ---- what it answers ---------------------------------------------------------------------------


def conversation(store: Any) -> list[Any]:
    """Every verb in every situation, and what is answered."""
    said: list[Any] = [store.get("a"), store.compare_set("a", "x", "y"), store.get("a")]
    said += [store.compare_set("a", "", "z"), store.get("a"), store.compare_set("a", "", "q")]
    said += [store.compare_set("a", "z", "w"), store.get("a")]
    said += [store.set("a", "ä\0\n"), store.get("a"), store.set("a", ""), store.get("a")]
    said += [store.compare_set("a", "", "anew"), store.get_all(["a", "none", "a"])]
    said += [store.set("large", "x" * LARGEST), len(store.get("large")), store.get_all([])]
    return said


def test_store_verbs_are_answered_alike_by_both_stores(run_ranks) -> None:
    """The store and the store of a world answer the three verbs alike."""
    wanted = ["", None, "", "z", "z", "z", "w", "w", None, "ä\0\n", None, "", "anew"]
    wanted += [["anew", "", "anew"], None, LARGEST, []]

    def fn(folder: Path) -> list[list[Any]]:
        stores = [
            WorldStore(dist.HashStore(), "here", 10.0),
            Durable().client(),
            Durable(folder / "keys").client(),
            Durable(token=TOKEN).client(),
        ]
        return [conversation(store.under("run")) for store in stores]

    for said in alone(run_ranks, fn):
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

    assert list(at.gather("n", (0, 1, 2), int, 60.0, "", look=look).items()) == [
        (0, 0),
        (1, 11),
        (2, 22),
    ]
    assert looks[0] == ([2], [0, 1]) and looks[-1] == ([0, 1, 2], [])
    late.join()
    for note in ("{", "[" * 60_000, '"7"', "7e400"):
        at.set("n/1", note)
        with pytest.raises(ValueError, match="the note run/n/1 of rank 1 in the store at the test"):
            at.gather("n", (0, 1, 2), int, 60.0, "", kind="rank")


def test_store_client_serves_threads_and_forks(run_ranks) -> None:
    """Threads and forked processes share a client."""

    def fn(folder: Path) -> list[str]:
        store = Durable().client()
        store.set("first", "x")

        def work(name: str) -> None:
            for n in range(25):
                store.set(f"{name}/{n}", name)

        threads = [threading.Thread(target=work, args=(f"t{i}",)) for i in range(4)]
        pid = os.fork()  # before there are threads
        if not pid:
            work("fork")
            os._exit(0)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert os.waitpid(pid, 0)[1] == 0
        names = ["t0", "t1", "t2", "t3", "fork"]
        return sorted(set(store.get_all([f"{name}/{n}" for name in names for n in range(25)])))

    assert alone(run_ranks, fn) == ["fork", "t0", "t1", "t2", "t3"]


# ---- on the disk, and once ---------------------------------------------------------------------


def test_store_keeps_what_was_answered_after_a_kill(run_ranks) -> None:
    """What the store has answered is there after it was killed and started again."""

    def fn(folder: Path) -> Any:
        store = Durable(folder / "keys")
        client = store.client()
        first = client.identity()
        for n in range(20):
            client.set(f"set/{n}", str(n))
        client.compare_set("once", "", "me")
        client.set("gone", "x")
        client.set("gone", "")
        store.kill()
        store.start()
        held = (
            [client.get(f"set/{n}") for n in range(20)],
            client.compare_set("once", "", "you"),
            client.get("gone"),
        )
        return held, first, client.identity()

    held, first, now = alone(run_ranks, fn)
    assert held == ([str(n) for n in range(20)], "me", "")
    assert (now.name, first.generation, now.generation) == (first.name, 1, 2)


def test_store_made_anew_is_noticed(run_ranks) -> None:
    """A store that was made anew is noticed before it is changed."""

    def fn(folder: Path) -> Any:
        store = Durable(folder / "keys")
        client = store.client(5.0)
        client.set("epoch", "8")
        store.kill()
        for file in folder.glob("keys*"):
            file.unlink()
        store.start()
        texts = []
        for ask in (
            lambda: client.compare_set("epoch", "", "8"),
            lambda: client.get("epoch"),
            client.identity,
        ):
            with pytest.raises(StoreSilent) as error:
                ask()
            texts.append(str(error.value))
        anew = store.client()
        return texts, anew.get("epoch"), anew.identity().generation

    texts, there, generation = alone(run_ranks, fn)
    assert all("was made anew since, without what it held before" in text for text in texts)
    assert (there, generation) == ("", 1)


def test_store_compare_set_with_a_lost_answer(run_ranks) -> None:
    """A compare_set whose answer was lost knows its own success. The relay holds what comes back,
    then all is cut, and the client comes by another way.
    """

    def fn(folder: Path) -> Any:
        store = Durable(folder / "keys")
        watch = store.client()
        found = []
        for restart in (False, True):
            relay = Relay(store.port)
            client = store.client(20.0, port=relay.port)
            client.get("k")
            relay.hold(forth=False)
            answers: list[Any] = []
            key = f"slot/{restart}"
            thread = threading.Thread(
                target=lambda c=client, a=answers, k=key: a.append(c.compare_set(k, "", "me"))
            )
            thread.start()
            while not watch.get(key):  # it has been made
                time.sleep(0.01)
            if restart:
                store.kill()
                store.start()
            relay.cut(reset=True)
            client._line._place = client._line._place._replace(port=store.port)
            thread.join()
            found.append((answers[0], watch.get(key), watch.compare_set(key, "", "you")))
            relay.close()
        return found

    assert alone(run_ranks, fn) == [("me", "me", "me")] * 2


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


def test_store_client_get_all_asks_until_all_are_there(run_ranks: Any) -> None:
    """A client finds all keys, whatever fits in one answer."""

    def fn(folder: Path) -> bool:
        client = Durable().client()
        values = {f"k{n}": chr(97 + n % 26) * (n % 7 * 100_000) for n in range(40)}
        for key, value in values.items():
            client.set(key, value)
        keys = [*values, "nothing", *reversed(values)]
        return client.get_all(keys) == [values.get(key, "") for key in keys]

    assert alone(run_ranks, fn)


def test_store_compare_set_race_has_one_winner(run_ranks) -> None:
    """Of two clients that race for a key one wins."""

    def fn(folder: Path) -> list[list[str]]:
        store = Durable(folder / "keys")
        found: list[list[str]] = [[], [], []]

        def race(n: int) -> None:
            client = store.client()
            for epoch in range(30):
                found[n].append(client.compare_set(f"epoch/{epoch}", "", str(n)))

        threads = [threading.Thread(target=race, args=(n,)) for n in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found

    one, two, three = alone(run_ranks, fn)
    assert len(one) == 30 and one == two == three and set(one) <= {"0", "1", "2"}


# ---- a store that stands still or ends ---------------------------------------------------------


def test_store_frozen_is_silent_and_answers_again(run_ranks) -> None:
    """A frozen store is an error within the deadline, and answers again when it goes on."""

    def fn(folder: Path) -> Any:
        store = Durable(folder / "keys")
        at = store.client(1.2).under("run")
        at.set("k", "v")
        store.freeze()
        began = time.monotonic()
        with pytest.raises(StoreSilent) as error:
            at.set("n", "1")
        took = time.monotonic() - began
        store.wake()
        at.deadline = 10.0
        at.set("n", "2")
        return took, str(error.value), at.get("k"), at.get("n")

    took, text, value, n = alone(run_ranks, fn)
    assert 1.0 < took < 5.0 and "does not answer within 1.2 s" in text and value == "v"
    # what was not answered has happened or not, and happens no more
    assert n == "2"


def test_store_restart_is_not_noticed(run_ranks) -> None:
    """A restart of the store between questions, and within one, is not noticed by the client."""

    def fn(folder: Path) -> list[str]:
        store, ends = Durable(folder / "keys"), []

        def count(key: str) -> None:
            client = store.client(30.0)
            for n in range(60):
                before = str(n) if n else ""
                assert client.compare_set(key, before, str(n + 1)) == str(n + 1)
                time.sleep(0.005)
            ends.append(client.get(key))

        threads = [threading.Thread(target=count, args=(f"n{n}",)) for n in range(3)]
        for thread in threads:
            thread.start()
        for _ in range(3):
            time.sleep(0.15)
            store.kill()
            store.start()
        for thread in threads:
            thread.join()
        return ends

    assert alone(run_ranks, fn) == ["60", "60", "60"]


def test_store_dead_cable_is_silence(run_ranks) -> None:
    """A dead cable is reported as silence within the deadline."""

    def fn(folder: Path) -> Any:
        store = Durable()
        relay = Relay(store.port)
        client = store.client(0.5, port=relay.port)
        client.set("k", "v")
        relay.hold()
        with pytest.raises(StoreSilent):
            client.get("k")
        relay.let_go()
        value = client.within(10.0).get("k")
        relay.close()
        return value

    assert alone(run_ranks, fn) == "v"


def test_store_absent_wait_is_bounded(run_ranks) -> None:
    """A caller that can do without the store waits no longer than it said, and asks it again as
    soon as it is there, on the same client.
    """

    def fn(folder: Path) -> Any:
        store = Durable(folder / "keys")
        client = store.client()
        client.set("k", "v")
        store.kill()
        client.deadline, client.absent = 20.0, 0.3
        with pytest.raises(StoreSilent) as error:
            client.get("k")
        store.start()
        return str(error.value), client.get("k")

    text, value = alone(run_ranks, fn)
    assert "is not there (nobody listens, for 0.3 s)" in text and value == "v"


# ---- bounds ------------------------------------------------------------------------------------


def test_store_keys_and_values_are_bounded(run_ranks) -> None:
    """Keys and values beyond their bounds are refused by client and store."""

    def fn(folder: Path) -> Any:
        store = Durable(keys=3, room=1 << 20)
        client, texts = store.client(), []
        tries = [
            lambda: client.set("k", "x" * (LARGEST + 1)),
            lambda: client.compare_set("k", "", "x" * (LARGEST + 1)),
            lambda: client.set("", "x"),
            lambda: client.get("k" * (LONGEST + 1)),
            lambda: client.set("fourth", "x"),
        ]
        client.set("text", "1")
        client.set("sum", "2")
        client.set("k" * LONGEST, "3")
        for call in tries:
            with pytest.raises(ValueError) as error:
                call()
            texts.append(str(error.value)[-200:])
        client.set("text", "")
        client.set("fourth", "4")
        return texts, client.get_all(["text", "fourth", "sum"])

    texts, there = alone(run_ranks, fn)
    wanted = [f"{LARGEST + 1} bytes, allowed are {LARGEST}"] * 2 + [
        "0 bytes, allowed are 1 to 512",
        "513 bytes, allowed",
        "holds 3 keys, and no more",
    ]
    assert there == ["", "4", "2"]
    assert all(part in text for part, text in zip(wanted, texts, strict=True))


def test_store_full_disk_is_said(run_ranks) -> None:
    """A full disk is an error of the question, and nothing else is lost."""

    def fn(folder: Path) -> Any:
        client = Durable(folder / "keys", room=5 * LARGEST).client()
        client.set("first", "kept")
        with pytest.raises(StoreSilent) as error:
            for n in range(9):
                client.set(f"large{n}", "x" * LARGEST)
        client.set("large0", "")
        client.set("small", "fits")
        return str(error.value), client.get("first"), client.get("small")

    text, first, small = alone(run_ranks, fn)
    assert "cannot write its file: database or disk is full" in text
    assert (first, small) == ("kept", "fits")


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
def test_store_token_wrong_is_named(run_ranks, there: str, here: str) -> None:
    """A token that is not the store's is named by the error."""

    def fn(folder: Path) -> Any:
        store = Durable(token=there)
        with pytest.raises(ValueError) as error:
            store.client(20.0, here).set("k", "v")
        return str(error.value), store.client().get("k")

    text, changed = alone(run_ranks, fn)
    assert (
        "ISLAND_TOKEN "
        + ("is" if here else "is not")
        + " set here, and must be the same at the store"
        in text
    )
    assert not changed


def test_store_token_short_is_refused(run_ranks) -> None:
    """A short token is refused, and the client can be closed: a socket that was left over once held
    the context at its end, for ever.
    """

    def fn(folder: Path) -> str:
        with pytest.raises(ValueError) as error:
            connect(Durable(token=TOKEN).endpoint, 5.0, 5.0, "short")
        return str(error.value)

    assert "ISLAND_TOKEN has 5 characters" in alone(run_ranks, fn)


def test_store_tunnel_without_a_store_is_no_wrong_token(run_ranks) -> None:
    """A tunnel without a store behind it is no wrong token: it takes connections and closes them,
    and the store may come yet.
    """

    def fn(folder: Path) -> str:
        server = socket.create_server(("127.0.0.1", 0))

        def close_all() -> None:
            while True:
                server.accept()[0].close()

        threading.Thread(target=close_all, daemon=True).start()
        with pytest.raises(StoreSilent) as error:
            StoreClient(f"127.0.0.1:{server.getsockname()[1]}", TOKEN, 1.5).get("k")
        return str(error.value)

    assert "does not answer within 1.5 s (it closes the connection)" in alone(run_ranks, fn)


def test_store_port_garbage_does_no_harm(run_ranks) -> None:
    """Garbage on the port does the store no harm."""

    def fn(folder: Path) -> Any:
        store, rng = Durable(), random.Random(0)
        client = store.client()
        client.set("k", "v")
        greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + b"\x00" + bytes(31)
        ends = []
        for n in range(40):
            end = socket.create_connection(("127.0.0.1", store.port))
            ends.append(end)
            end.sendall((greeting if n % 2 else b"") + rng.randbytes(rng.randrange(400)))
        context = zmq.Context()
        rude = context.socket(zmq.DEALER)
        rude.linger = 0
        rude.connect(f"tcp://127.0.0.1:{store.port}")
        good = pack(Question("set", 1, b"r" * 16, b"", ["k"], ["theirs"]))
        wrong = [
            b"",
            b"x",
            rng.randbytes(200),
            good[:-1],
            good + b"x",
            good[:4] + b"\x09" + good[5:],
            good,
            b"x" * (LARGEST_MESSAGE + 1),
        ]
        for data in wrong:
            rude.send(data)
        rude.send_multipart([b"a", b"b"])
        value = client.get("k")
        for end in ends:
            end.close()
        context.destroy(0)
        return value, client.get("k"), store.client().get("k")

    assert alone(run_ranks, fn) == ("v", "v", "v")


@pytest.mark.parametrize("token", ["", TOKEN])
def test_store_connection_without_handshake_is_closed(run_ranks, token: str) -> None:
    """A connection without a handshake is closed, whether it says nothing or stops in the middle of
    its greeting.
    """

    def run(folder: Path) -> None:
        store = Durable(token=token)
        idle = [socket.create_connection(("127.0.0.1", store.port), timeout=15) for _ in range(20)]
        for begun in idle[::2]:
            begun.sendall(b"\xff" + bytes(8))
        for one in idle:
            while one.recv(64):  # its own greeting, then the end; a timeout where it keeps it
                pass
        store.client().set("key", "value")

    alone(run_ranks, run)


def test_store_question_number_beyond_the_bound_is_refused(run_ranks) -> None:
    """A question with a number beyond the bound is refused and harms nobody."""

    def run(folder: Path) -> None:
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

    alone(run_ranks, run)


def test_store_of_another_release_is_refused(run_ranks) -> None:
    """A store of another release is refused by an error that says so."""

    def fn(folder: Path) -> str:
        from fsdp_demo.store import connection

        store = Durable()
        there = connection.pack
        connection.pack = lambda message: there(message).replace(b"FDSQ3", b"FDSQ4")
        with pytest.raises(ValueError) as error:
            store.client().get("k")
        return str(error.value)

    assert "refuses: a message of the store cannot be read" in alone(run_ranks, fn)


@pytest.mark.parametrize("libuv", [True, False])
def test_store_of_torch_is_refused(run_ranks, libuv: bool) -> None:
    """A TCPStore of torch is recognised and refused in one line."""

    def fn(folder: Path) -> str:
        theirs = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False, use_libuv=libuv)
        with pytest.raises(ValueError) as error:
            connect(f"127.0.0.1:{theirs.port}", 20.0, 5.0)
        return str(error.value).replace(str(theirs.port), "PORT")

    text = alone(run_ranks, fn)
    assert "a store of torch.distributed answers at ISLAND_ENDPOINT=127.0.0.1:PORT" in text
    assert "start there `fsdp-demo store --bind 127.0.0.1:PORT`" in text and "\n" not in text


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
