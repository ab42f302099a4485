"""The durable store: torch's answers, on the disk before they are given, each change once, and
nobody who harms it.
"""

from __future__ import annotations

import os
import random
import socket
import struct
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from fsdp_demo.comm.store_client import Asker
from fsdp_demo.comm.store_wire import (
    LARGEST_MESSAGE,
    NOBODY,
    VERSION,
    Answer,
    Kind,
    Question,
    Status,
    read_answer,
    read_question,
)
from fsdp_demo.comm.stores import LARGEST, LONGEST
from fsdp_demo.errors import StoreSilent, WireError
from fsdp_demo.launch.records import Records

from ..support.durable import TOKEN, Durable
from ..support.relay import Relay

zmq = pytest.importorskip("zmq")


def alone(run_ranks: Any, fn: Any) -> Any:
    """`fn(folder)` in a process of its own, which may fork."""
    return run_ranks(lambda me: fn(me.folder), 1, 1)[0]


# ---- what it answers ---------------------------------------------------------------------------


def conversation(store: Any) -> list[Any]:
    """Every question in every situation, and what is answered."""
    said: list[Any] = [store.check(["a"]), store.compare_set("a", "x", "y"), store.check(["a"])]
    said += [store.compare_set("a", "", ""), store.check(["a"]), store.get("a")]
    said += [
        store.compare_set("a", "", "z"),
        store.compare_set("a", "", "q"),
        store.compare_set("a", "z", "w"),
        store.get("a"),
    ]
    said += [
        store.add("n", 3),
        store.get("n"),
        store.add("n", -5),
        store.add("n", 0),
        store.add("new", 0),
        store.check(["n", "new", "a"]),
    ]
    said += [
        store.set("a", "ä\0\n"),
        store.get("a"),
        store.set("a", ""),
        store.get("a"),
        store.check(["a", "none"]),
        store.check([]),
    ]
    said += [
        store.set("large", "x" * LARGEST),
        len(store.get("large")),
        store.set("12", "40"),
        store.add("12", 2),
    ]
    said += [
        store.delete_key("n"),
        store.delete_key("n"),
        store.check(["n"]),
        store.add("n", 1),
        store.compare_set("n", "1", "2"),
    ]
    return said


def test_it_answers_as_torchs_store_does(run_ranks) -> None:
    def fn(folder: Path) -> list[list[Any]]:
        torchs = dist.TCPStore(
            "127.0.0.1", 0, None, True, timedelta(seconds=10), wait_for_workers=False
        )
        stores = [
            torchs,
            Durable().client(),
            Durable(folder / "keys").client(),
            Durable(token=TOKEN).client(),
        ]
        return [conversation(store) for store in stores]

    torchs, *others = alone(run_ranks, fn)
    assert all(other == torchs for other in others)


def test_a_get_waits_for_its_key_to_the_deadline(run_ranks) -> None:
    def fn(folder: Path) -> tuple[bytes, str]:
        store = Durable()
        one, other = store.client(), store.client(0.2)
        threading.Timer(0.2, one.set, ("late", "here")).start()
        found = one.get("late")
        with pytest.raises(StoreSilent) as error:
            other.get("never")
        return found, str(error.value)

    found, text = alone(run_ranks, fn)
    assert found == b"here" and "has got no 'never' within 0.2 s" in text


def test_threads_and_forks_share_a_client(run_ranks) -> None:
    def fn(folder: Path) -> bytes:
        store = Durable().client()
        store.add("n", 1)
        threads = [
            threading.Thread(target=lambda: [store.add("n", 1) for _ in range(25)])
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        pid = os.fork()
        if not pid:
            store.add("n", 1000)
            os._exit(0)
        for thread in threads:
            thread.join()
        assert os.waitpid(pid, 0)[1] == 0
        return bytes(store.get("n"))

    assert alone(run_ranks, fn) == b"1101"


# ---- on the disk, and once ---------------------------------------------------------------------


def test_what_was_answered_is_there_after_a_kill(run_ranks) -> None:
    def fn(folder: Path) -> Any:
        store = Durable(folder / "keys")
        client = store.client()
        first = client.identity()
        for n in range(20):
            client.set(f"set/{n}", str(n))
        client.add("sum", 7)
        client.compare_set("once", "", "me")
        client.set("gone", "")
        client.delete_key("gone")
        store.kill()
        store.start()
        held = (
            [client.get(f"set/{n}") for n in range(20)],
            client.add("sum", 0),
            client.compare_set("once", "", "you"),
        )
        return (*held, client.check(["gone"])), first, client.identity()

    held, first, now = alone(run_ranks, fn)
    assert held == ([str(n).encode() for n in range(20)], 7, b"me", False)
    assert (now.name, first.generation, now.generation) == (first.name, 1, 2)


def test_a_store_that_was_made_anew_is_noticed_before_it_is_changed(run_ranks) -> None:
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
        return texts, anew.check(["epoch"]), Asker(anew, "here", 5.0).identity().generation

    texts, there, generation = alone(run_ranks, fn)
    assert all("was made anew since, without what it held before" in text for text in texts)
    assert (there, generation) == (False, 1)


def test_a_change_whose_answer_was_lost_is_made_once(run_ranks) -> None:
    """The relay holds what comes back, then all is cut, and the client comes by another way."""

    def fn(folder: Path) -> Any:
        store = Durable(folder / "keys")
        watch = store.client()
        found = []
        for restart in (False, True):
            relay = Relay(store.port)
            client = store.client(20.0, port=relay.port)
            client.add("n", 1)
            before = watch.add("n", 0)
            relay.hold(forth=False)
            answers: list[Any] = []
            thread = threading.Thread(target=lambda c=client, a=answers: a.append(c.add("n", 10)))
            thread.start()
            while watch.add("n", 0) == before:  # it has been made
                time.sleep(0.01)
            if restart:
                store.kill()
                store.start()
            relay.cut(reset=True)
            client._client._address = f"tcp://127.0.0.1:{store.port}"
            thread.join()
            found.append((answers[0] - before, watch.add("n", 0) - before))
            relay.close()
        return found

    assert alone(run_ranks, fn) == [(10, 10), (10, 10)]


def question(
    kind: Kind, records: Records, number: int, *fields: bytes, client: bytes = b"c" * 16
) -> Question:
    return Question(kind, records.name, client, number, fields)


def test_a_repeated_question_has_its_first_answer_and_an_old_one_none(tmp_path: Path) -> None:
    """Also after a restart, and where somebody else has changed the key since."""
    records = Records(tmp_path / "keys")
    win = question(Kind.COMPARE_SET, records, 5, b"k", b"", b"mine")
    add = question(Kind.ADD, records, 6, b"n", b"1")
    first = records.answer([win])[0]
    assert first is not None and first.fields == (b"mine",)
    records.answer([question(Kind.SET, records, 1, b"k", b"theirs", client=b"d" * 16)])
    assert records.answer([win]) == [first]
    assert records.answer([question(Kind.GET, records, 7, b"k", client=b"d" * 16)])[0].fields == (
        b"theirs",
    )
    (one,) = records.answer([add])
    assert records.answer([win]) == [None]  # a copy that was late
    records.close()
    records = Records(tmp_path / "keys")
    assert records.answer([add, add]) == [one, one] and one.fields == (b"1",)
    records.close()


def test_many_keys_are_found_by_one_question_and_nothing_is_written(tmp_path: Path) -> None:
    """One answer has room for 1 MiB of values, and for one value at least."""
    records = Records(tmp_path / "keys")
    values = {b"a": b"1" * (LARGEST // 2), b"b": b"2" * (LARGEST // 2), b"c": b"3", b"d": b""}
    for number, (key, value) in enumerate(values.items(), 1):
        records.answer([question(Kind.SET, records, number, key, value)])
    ask = question(Kind.FIND, records, 9, b"nothing", b"a", b"b", b"c")
    (found,) = records.answer([ask])
    assert found is not None and found.fields == (b"", values[b"a"], values[b"b"])
    (found,) = records.answer([ask._replace(number=10, fields=(b"d", b"c", b"nothing"))])
    assert found is not None and found.fields == (b"", b"3", b"")
    assert records._held == len(values)
    records.close()


def test_a_client_finds_all_keys_whatever_fits_in_one_answer(run_ranks: Any) -> None:
    def fn(folder: Path) -> bool:
        store = Durable()
        client = store.client()
        values = {f"k{n}": bytes([n % 256]) * (n % 7 * 100_000) for n in range(40)}
        for key, value in values.items():
            client.set(key, value)
        at = Asker(client, "here", 20.0)
        keys = [*values, "nothing", *reversed(values)]
        found = client.find_all(keys)
        return (
            found == [values.get(key, b"") for key in keys]
            and at.peek_all(["nothing", "k1"]) == ["", "\x01" * 100_000]
            and at.peek_all([]) == []
            and client.find("nothing") is None
        )

    assert alone(run_ranks, fn)


def test_a_lost_comparison_that_comes_late_does_not_act(tmp_path: Path) -> None:
    records = Records(tmp_path / "keys")
    lose = question(Kind.COMPARE_SET, records, 1, b"k", b"old", b"new")
    records.answer([lose, question(Kind.CHECK, records, 2, b"k")])
    records.answer([question(Kind.SET, records, 1, b"k", b"old", client=b"d" * 16)])
    assert records.answer([lose]) == [None]
    assert records.answer([question(Kind.GET, records, 3, b"k")])[0].fields == (b"old",)
    records.close()


def test_two_that_race_have_one_winner(run_ranks) -> None:
    def fn(folder: Path) -> list[list[bytes]]:
        store = Durable(folder / "keys")
        found: list[list[bytes]] = [[], [], []]

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
    assert len(one) == 30 and one == two == three and set(one) <= {b"0", b"1", b"2"}


# ---- a store that stands still or ends ---------------------------------------------------------


def test_a_frozen_store_is_silent_within_the_deadline_and_answers_again(run_ranks) -> None:
    def fn(folder: Path) -> Any:
        store = Durable(folder / "keys")
        at = Asker(store.client(), "here", 1.2).under("run")
        at.set("k", "v")
        store.freeze()
        began = time.monotonic()
        with pytest.raises(StoreSilent) as error:
            at.add("n", 1)
        took = time.monotonic() - began
        store.wake()
        at.deadline = 10.0
        return took, str(error.value), at.get("k"), at.add("n", 1), at.add("n", 0)

    took, text, value, first, second = alone(run_ranks, fn)
    assert 1.0 < took < 5.0 and "does not answer within 1.2 s" in text and value == b"v"
    # what was not answered has happened or not, and happens no more
    assert first == second and first in (1, 2)


def test_a_restart_between_questions_and_within_them_is_not_noticed(run_ranks) -> None:
    def fn(folder: Path) -> list[int]:
        store, ends = Durable(folder / "keys"), []

        def count(key: str) -> None:
            client = store.client(30.0)
            for _ in range(60):
                client.add(key, 1)
                time.sleep(0.005)
            ends.append(client.add(key, 0))

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

    assert alone(run_ranks, fn) == [60, 60, 60]


def test_a_dead_cable_is_silence(run_ranks) -> None:
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

    assert alone(run_ranks, fn) == b"v"


def test_who_can_do_without_waits_for_an_absent_store_no_longer_than_it_said(run_ranks) -> None:
    """And asks it again as soon as it is there, on the same client."""

    def fn(folder: Path) -> Any:
        store = Durable(folder / "keys")
        client = store.client()
        client.set("k", "v")
        store.kill()
        with pytest.raises(StoreSilent) as error:
            client.within(20.0, absent=0.3).get("k")
        store.start()
        return str(error.value), client.within(20.0, absent=0.3).get("k")

    text, value = alone(run_ranks, fn)
    assert "is not there (nobody listens, for 0.3 s)" in text and value == b"v"


# ---- bounds ------------------------------------------------------------------------------------


def test_keys_and_values_are_bounded_on_both_sides(run_ranks) -> None:
    def fn(folder: Path) -> Any:
        store = Durable(keys=3, room=1 << 20)
        client, texts = store.client(), []
        tries = [
            lambda: client.set("k", "x" * (LARGEST + 1)),
            lambda: client.compare_set("k", "", "x" * (LARGEST + 1)),
            lambda: client.set("", "x"),
            lambda: client.get("k" * (LONGEST + 1)),
            lambda: client.add("text", 1),
            lambda: client.add("sum", 2**62),
            lambda: client.set("fourth", ""),
        ]
        client.set("text", "no number")
        client.add("sum", 2**62)
        client.set("k" * LONGEST, "")
        for call in tries:
            with pytest.raises(ValueError) as error:
                call()
            texts.append(str(error.value)[-200:])
        client.delete_key("text")
        client.set("fourth", "")
        return texts, client.check(["fourth", "sum"])

    texts, there = alone(run_ranks, fn)
    wanted = [f"{LARGEST + 1} bytes, allowed are {LARGEST}"] * 2 + [
        "0 bytes, allowed are 1 to 512",
        "513 bytes, allowed",
    ]
    wanted += ["no sum of 64 bits"] * 2 + ["holds 3 keys, and no more"]
    assert there and all(part in text for part, text in zip(wanted, texts, strict=True))


def test_a_full_disk_is_said_and_nothing_else_is_lost(run_ranks) -> None:
    def fn(folder: Path) -> Any:
        client = Durable(folder / "keys", room=5 * LARGEST).client()
        client.set("first", "kept")
        with pytest.raises(StoreSilent) as error:
            for n in range(9):
                client.set(f"large{n}", "x" * LARGEST)
        client.delete_key("large0")
        client.set("small", "fits")
        return str(error.value), client.get("first"), client.get("small")

    text, first, small = alone(run_ranks, fn)
    assert "cannot write its file: database or disk is full" in text and (first, small) == (
        b"kept",
        b"fits",
    )


def test_one_question_that_fails_does_not_take_those_beside_it_along(tmp_path: Path) -> None:
    records = Records(tmp_path / "keys", room=3 * LARGEST)
    clients = [bytes([n]) * 16 for n in range(6)]
    asked = [
        question(Kind.SET, records, 1, b"k%d" % n, b"x" * (LARGEST if n == 3 else 9), client=c)
        for n, c in enumerate(clients)
    ]
    asked[2] = question(Kind.SET, records, 1, b"k2", b"x" * LARGEST, client=clients[2])
    asked[4] = question(Kind.SET, records, 1, b"k4", b"x" * LARGEST, client=clients[4])
    statuses = [answer.status for answer in records.answer(asked) if answer is not None]
    assert (
        statuses.count(Status.DONE) >= 4
        and Status.FAILED in statuses
        and statuses[5] is Status.DONE
    )
    held = [
        records.answer([question(Kind.CHECK, records, 9, b"k%d" % n)])[0].fields[0]
        for n in range(6)
    ]
    assert held == [b"1" if status is Status.DONE else b"0" for status in statuses]
    records.close()


def test_a_file_that_is_no_stores_or_is_open_elsewhere_is_refused(tmp_path: Path) -> None:
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
def test_a_token_that_is_not_the_same_is_named(run_ranks, there: str, here: str) -> None:
    def fn(folder: Path) -> Any:
        store = Durable(token=there)
        with pytest.raises(ValueError) as error:
            store.client(20.0, here).set("k", "v")
        return str(error.value), store.client().check(["k"])

    text, changed = alone(run_ranks, fn)
    assert (
        "ISLAND_TOKEN "
        + ("is" if here else "is not")
        + " set here, and must be the same at the store"
        in text
        and not changed
    )


def test_a_short_token_is_refused_and_the_client_can_be_closed(run_ranks) -> None:
    """A socket that was left over once held the context at its end, for ever."""

    def fn(folder: Path) -> str:
        from fsdp_demo.comm.store_client import connect

        with pytest.raises(ValueError) as error:
            connect(Durable(token=TOKEN).endpoint, 5.0, 5.0, 5.0, "short")
        return str(error.value)

    assert "ISLAND_TOKEN has 5 characters" in alone(run_ranks, fn)


def test_a_tunnel_without_a_store_behind_it_is_no_wrong_token(run_ranks) -> None:
    """It takes connections and closes them: the store may come yet."""

    def fn(folder: Path) -> str:
        server = socket.create_server(("127.0.0.1", 0))

        def close_all() -> None:
            while True:
                server.accept()[0].close()

        threading.Thread(target=close_all, daemon=True).start()
        from fsdp_demo.comm.store_zeromq import ZeroMQStore

        with pytest.raises(StoreSilent) as error:
            ZeroMQStore(f"zmq://127.0.0.1:{server.getsockname()[1]}", TOKEN, 1.5).check(["k"])
        return str(error.value)

    assert "does not answer within 1.5 s (it closes the connection)" in alone(run_ranks, fn)


def test_garbage_on_the_port_does_no_harm(run_ranks) -> None:
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
        good = Question(Kind.SET, NOBODY, b"r" * 16, 1, (b"k", b"theirs")).pack()
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

    assert alone(run_ranks, fn) == (b"v", b"v", b"v")


@pytest.mark.parametrize("token", ["", TOKEN])
def test_a_connection_that_does_not_shake_hands_is_closed(run_ranks, token: str) -> None:
    """Whether it says nothing or stops in the middle of its greeting."""

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


def test_a_question_numbered_beyond_the_file_is_refused_and_harms_nobody(run_ranks) -> None:
    def run(folder: Path) -> None:
        store = Durable()
        client = zmq.Context().socket(zmq.DEALER)
        client.linger = 0
        client.connect(f"tcp://127.0.0.1:{store.port}")
        client.send(Question(Kind.HELLO, NOBODY, b"a" * 16, 1).pack())
        name = read_answer(client.recv()).fields[0]
        client.send(Question(Kind.SET, name, b"b" * 16, 2**63, (b"k", b"v")).pack())
        assert client.poll(10_000), "the store does not answer"
        answer = read_answer(client.recv())
        assert answer.status is Status.REFUSED and b"number" in answer.fields[0]
        client.send(Question(Kind.SET, name, b"b" * 16, 2**63 - 1, (b"k", b"v")).pack())
        assert read_answer(client.recv()).status is Status.DONE
        client.close(0)
        assert store.client().get("k") == b"v"

    alone(run_ranks, run)


def test_a_store_of_another_release_is_told_apart(run_ranks) -> None:
    """By the bytes of its answer; the five first are the same for ever."""

    def fn(folder: Path) -> str:
        from fsdp_demo.comm import store_wire

        store = Durable()
        store_wire.VERSION += 1
        with pytest.raises(ValueError) as error:
            store.client().check(["k"])
        return str(error.value)

    text = alone(run_ranks, fn)
    assert "is no store of this release" in text and "version 2, expected version 3" in text


def test_questions_and_answers_read_back_and_torn_ones_do_not() -> None:
    asked = Question(Kind.COMPARE_SET, b"s" * 16, b"c" * 16, 2**40, (b"key", b"", b"\0" * 70_000))
    answered = Answer(Status.DONE, 2**40, (b"value",))
    assert read_question(asked.pack()) == asked and read_answer(answered.pack()) == answered
    for read, data in (
        (read_question, asked._replace(fields=(b"k", b"e", b"d")).pack()),
        (read_answer, answered.pack()),
    ):
        for size in range(len(data)):
            with pytest.raises(WireError):
                read(data[:size])
    with pytest.raises(WireError, match="number 9223372036854775808, allowed are"):
        read_question(asked._replace(number=2**63).pack())
    long = struct.pack("<4sBBHQI", b"FDSA", VERSION, 0, 1, 1, 24) + struct.pack("<I", 2**32 - 1)
    with pytest.raises(WireError, match="torn"):
        read_answer(long)
