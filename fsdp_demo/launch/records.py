"""What the durable store keeps: keys and values in one sqlite file. Whatever was answered is on the
disk.
"""

from __future__ import annotations

import logging
import os
import secrets
import sqlite3
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from ..comm.store_wire import Answer, Kind, Question, Status
from ..comm.stores import LARGEST, LONGEST
from ..errors import see

log = logging.getLogger("fsdp_demo")

KEYS = 100_000
"""Keys that a store holds: a run makes some hundred."""

ROOM = 512 << 20
"""Bytes of the file; half as many where there is none, since the process that serves may not take
more memory than that.
"""

CLIENTS = 1 << 16
"""Clients whose last question is remembered, and changes for which an answer is."""

MEMORY = ":memory:"
"""Instead of a file: nothing outlives the process."""

_MARK, _FORM = 0x46445354, 1  # "FDST" in the file's head, and the form of the tables
_TABLES = """
CREATE TABLE IF NOT EXISTS store (name BLOB NOT NULL, generation INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS records (key BLOB PRIMARY KEY, value BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS answered (client BLOB PRIMARY KEY, number INTEGER NOT NULL, answer BLOB NOT NULL, change INTEGER NOT NULL);
CREATE INDEX IF NOT EXISTS answered_change ON answered (change);
"""  # noqa: E501
_CHANGES = (Kind.SET, Kind.ADD, Kind.COMPARE_SET, Kind.DELETE)
_HIGHEST = 2**63 - 1


class Records:
    """Keys, values and the last answer to each client, for one thread at a time.

    Args:
        file: made if it is not there; `MEMORY` for none.

    Attributes:
        name: 16 random bytes, made with the file. generation: how often it was opened, from 1.

    Raises:
        ValueError: the file is another program's, is open in another store, or cannot be written.
    """

    def __init__(self, file: str | Path, keys: int = KEYS, room: int = ROOM):
        self._file, self._most = file, keys
        try:
            if str(file) != MEMORY:
                os.close(os.open(file, os.O_CREAT | os.O_RDWR, 0o600))  # for nobody else to read
            self._sql = sqlite3.connect(
                str(file), timeout=1.0, isolation_level=None, check_same_thread=False
            )
            self._open(room)
        except (OSError, sqlite3.Error) as error:
            raise ValueError(f"--file {file}: {_cure(error)}") from None
        self._seen: OrderedDict[bytes, int] = OrderedDict()

    def _open(self, room: int) -> None:
        # EXCLUSIVE: nobody else can open the file while this process lives. FULL: a commit returns
        # when the disk has it.
        for pragma in (
            "locking_mode=EXCLUSIVE",
            "journal_mode=WAL",
            "synchronous=FULL",
            "fullfsync=1",
        ):
            self._sql.execute(f"PRAGMA {pragma}").fetchall()
        (mark,), (form,) = (
            self._sql.execute(f"PRAGMA {name}").fetchone()
            for name in ("application_id", "user_version")
        )
        if (mark, form) != (_MARK, _FORM) and self._sql.execute(
            "SELECT count(*) FROM sqlite_master"
        ).fetchone()[0]:
            raise ValueError(
                f"--file {self._file}: is no store's file, or one of another release; take another "
                "file"
            )
        if [("ok",)] != self._sql.execute("PRAGMA quick_check").fetchall():
            raise sqlite3.DatabaseError("it is damaged")
        room = min(room, ROOM // 2) if str(self._file) == MEMORY else room
        (page,) = self._sql.execute("PRAGMA page_size").fetchone()
        self._sql.execute(f"PRAGMA max_page_count={room // page}")
        self._sql.executescript(
            f"BEGIN IMMEDIATE;{_TABLES}PRAGMA application_id={_MARK};PRAGMA "
            f"user_version={_FORM};COMMIT;"
        )
        if self._sql.execute("SELECT count(*) FROM store").fetchone()[0] == 0:
            self._sql.execute("INSERT INTO store VALUES (?, 0)", (secrets.token_bytes(16),))
        self._sql.execute("UPDATE store SET generation = generation + 1")
        self.name, self.generation = self._sql.execute(
            "SELECT name, generation FROM store"
        ).fetchone()
        (self._change,) = self._sql.execute(
            "SELECT coalesce(max(change), 0) FROM answered"
        ).fetchone()
        self._count()

    def _count(self) -> None:
        (self._held,) = self._sql.execute("SELECT count(*) FROM records").fetchone()

    def close(self) -> None:
        """Close the file."""
        self._sql.close()

    # ---- answers -------------------------------------------------------------------------------

    def answer(self, questions: Sequence[Question]) -> list[Answer | None]:
        """Answers in order, None for a question that is too old to be answered. Changes are on the
        disk when it returns: all of them by one commit, unless that fails; then each by its own."""
        try:
            return self._together(questions)
        except sqlite3.Error as error:
            if len(questions) > 1:
                return [answer for question in questions for answer in self.answer([question])]
            log.error("the store cannot write %s: %s", self._file, error)
            return [
                Answer(
                    Status.FAILED,
                    questions[0].number,
                    (f"it cannot write its file: {error}".encode(),),
                )
            ]

    def _together(self, questions: Sequence[Question]) -> list[Answer | None]:
        self._sql.execute("BEGIN")
        try:
            answers = [self._one(question) for question in questions]
            self._sql.execute("COMMIT")
        except BaseException:
            if self._sql.in_transaction:  # a full disk ends it by itself
                self._sql.execute("ROLLBACK")
            self._count()
            raise
        return answers

    def _one(self, question: Question) -> Answer | None:
        if question.number < self._seen.get(question.client, 0):
            # a copy that took longer than the questions after it: nobody waits for its answer, and
            # it may not act now
            return None
        self._seen[question.client] = question.number
        self._seen.move_to_end(question.client)
        if len(self._seen) > CLIENTS:
            self._seen.popitem(last=False)
        if question.kind is Kind.HELLO:
            return Answer(Status.DONE, question.number, (self.name, b"%d" % self.generation))
        if question.store != self.name:
            gone = (
                b"it was made anew since, without what it held before (its file was lost, or it "
                b"had none)"
            )
            return Answer(Status.FAILED, question.number, (gone,))
        try:
            status, fields = (
                self._changed(question) if question.kind in _CHANGES else self._read(question)
            )
        except ValueError as error:
            status, fields = Status.REFUSED, (str(error).encode(),)
        return Answer(status, question.number, fields)

    def _read(self, question: Question) -> tuple[Status, tuple[bytes, ...]]:
        if question.kind is Kind.FIND:
            return Status.DONE, self._found(question.fields)
        values = [self._value(_key(key)) for key in question.fields]
        if question.kind is Kind.CHECK:
            return Status.DONE, (b"0" if None in values else b"1",)
        return (Status.MISSING, ()) if values[0] is None else (Status.DONE, (values[0],))

    def _found(self, keys: Sequence[bytes]) -> tuple[bytes, ...]:
        """The values of the first keys, as many as one answer has room for: one at least."""
        found, room = list[bytes](), LARGEST
        for key in keys:
            value = self._value(_key(key)) or b""
            room -= len(value)
            if found and room < 0:
                break
            found.append(value)
        return tuple(found)

    def _changed(self, question: Question) -> tuple[Status, tuple[bytes, ...]]:
        """Make a change, or give the answer that was given when it was made."""
        before = self._sql.execute(
            "SELECT number, answer FROM answered WHERE client = ?", (question.client,)
        ).fetchone()
        if before is not None and before[0] == question.number:
            return Status.DONE, (before[1],)
        answer, written = self._change_of(question)
        if written:
            self._change += 1
            row = (question.client, question.number, answer, self._change)
            self._sql.execute("INSERT OR REPLACE INTO answered VALUES (?, ?, ?, ?)", row)
            if self._change % 256 == 0:
                self._sql.execute(
                    "DELETE FROM answered WHERE change <= ?", (self._change - CLIENTS,)
                )
        return Status.DONE, (answer,)

    def _change_of(self, question: Question) -> tuple[bytes, bool]:
        """The answer, and whether something was written."""
        key, *values = question.fields
        now = self._value(_key(key))
        if question.kind is Kind.DELETE:
            return self._delete(key) if now is not None else (b"0", False)
        if question.kind is Kind.SET:
            self._put(key, values[0], now)
            return b"", True
        if question.kind is Kind.ADD:
            total = b"%d" % _sum(key, now, values[0])
            return total, total != now and self._put(key, total, now)
        expected, desired = values
        if now is None and expected:
            return expected, False  # as torch's store does
        if (now or b"") != expected:
            return now or b"", False
        return desired, desired != now and self._put(key, desired, now)

    def _value(self, key: bytes) -> bytes | None:
        found = self._sql.execute("SELECT value FROM records WHERE key = ?", (key,)).fetchone()
        return None if found is None else bytes(found[0])

    def _put(self, key: bytes, value: bytes, now: bytes | None) -> bool:
        if len(value) > LARGEST:
            raise ValueError(
                f"the value of {key.decode(errors='replace')!r} has {len(value)} bytes, allowed "
                f"are {LARGEST}"
            )
        if now is None and self._held >= self._most:
            raise ValueError(
                f"it holds {self._held} keys, and no more are allowed: start a store with a new "
                "--file"
            )
        self._sql.execute("INSERT OR REPLACE INTO records VALUES (?, ?)", (key, value))
        self._held += now is None
        return True

    def _delete(self, key: bytes) -> tuple[bytes, bool]:
        self._sql.execute("DELETE FROM records WHERE key = ?", (key,))
        self._held -= 1
        return b"1", True


def _key(key: bytes) -> bytes:
    if not 0 < len(key) <= LONGEST:
        raise ValueError(f"a key has {len(key)} bytes, allowed are 1 to {LONGEST}")
    return key


def _sum(key: bytes, now: bytes | None, amount: bytes) -> int:
    try:
        total = int(now or b"0") + int(amount)
    except ValueError:
        total = _HIGHEST + 1
    if abs(total) > _HIGHEST or len(amount) > 20:
        text = (now or b"0")[:40].decode(errors="replace")
        raise ValueError(
            f"{text!r} of {key.decode(errors='replace')!r} and {amount[:40]!r} have no sum of 64 "
            "bits"
        )
    return total


def _cure(error: Exception) -> str:
    if "locked" in str(error):
        return f"another store has it open; stop that one, or take another file{see('store-file')}"
    if "not a database" in str(error) or "damaged" in str(error) or "malformed" in str(error):
        return f"{error}: no store's file, or a damaged one; take another file"
    return (
        f"{getattr(error, 'strerror', None) or error}; take a file in a folder that exists, can be "
        "written and is not full"
    )
