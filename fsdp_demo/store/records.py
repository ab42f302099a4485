"""What the store keeps: keys and values in one sqlite file. What was answered is on the disk."""

from __future__ import annotations

import logging
import os
import secrets
import sqlite3
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from .connection import LARGEST, Answer, Question

log = logging.getLogger("fsdp_demo")

KEYS = 100_000
"""Keys that a store holds: a run makes some hundred."""

ROOM = 512 << 20
"""Bytes of the file; half as many where there is none, since the process that serves may not take
more memory than that.
"""

CLIENTS = 1 << 16
"""Clients of which the number of the last question is remembered."""

MEMORY = ":memory:"
"""Instead of a file: nothing outlives the process."""

_MARK, _FORM = 0x46445354, 2  # "FDST" in the file's head, and the form of the tables
_TABLES = """
CREATE TABLE IF NOT EXISTS store (name BLOB NOT NULL, generation INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS records (key TEXT PRIMARY KEY, value TEXT NOT NULL);
"""


class Records:
    """Keys and values, for one thread at a time.

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
        modes = "locking_mode=EXCLUSIVE", "journal_mode=WAL", "synchronous=FULL", "fullfsync=1"
        for mode in modes:
            self._sql.execute(f"PRAGMA {mode}").fetchall()
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
        self._count()

    def _count(self) -> None:
        (self._held,) = self._sql.execute("SELECT count(*) FROM records").fetchone()

    def close(self) -> None:
        """Close the file."""
        self._sql.close()

    def answer(self, questions: Sequence[Question]) -> list[Answer | None]:
        """Answers in order, None for a question that is too old to be answered. Changes are on the
        disk when it returns: all of them by one commit, unless that fails; then each by its own."""
        try:
            return self._together(questions)
        except sqlite3.Error as error:
            if len(questions) > 1:
                return [answer for question in questions for answer in self.answer([question])]
            log.error("the store cannot write %s: %s", self._file, error)
            text = f"it cannot write its file: {error}"
            return [Answer("failed", questions[0].number, text=text)]

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
        if question.verb == "hello":
            return Answer("done", question.number, [self.name.hex(), str(self.generation)])
        if question.store != self.name:
            gone = (
                "it was made anew since, without what it held before (its file was lost, or it had "
                "none)"
            )
            return Answer("failed", question.number, text=gone)
        try:
            return Answer("done", question.number, self._values(question))
        except ValueError as error:
            return Answer("refused", question.number, text=str(error))

    def _values(self, question: Question) -> list[str]:
        """Make the change; the values of the answer."""
        if question.verb == "get":
            return self._found(question.keys)
        key, now = question.keys[0], self._value(question.keys[0])
        if question.verb == "set":
            self._put(key, question.values[0], now)
            return []
        expected, desired = question.values
        if now != expected:
            return [now]
        self._put(key, desired, now)
        return [desired]

    def _found(self, keys: Sequence[str]) -> list[str]:
        """The values of the first keys, as many as one answer has room for: one at least."""
        found, room = list[str](), LARGEST
        for key in keys:
            value = self._value(key)
            room -= len(value.encode())
            if found and room < 0:
                break
            found.append(value)
        return found

    def _value(self, key: str) -> str:
        found = self._sql.execute("SELECT value FROM records WHERE key = ?", (key,)).fetchone()
        return "" if found is None else str(found[0])

    def _put(self, key: str, value: str, now: str) -> None:
        if value == now:
            return
        if not value:
            self._sql.execute("DELETE FROM records WHERE key = ?", (key,))
        elif not now and self._held >= self._most:
            raise ValueError(
                f"it holds {self._held} keys, and no more are allowed: start a store with a new "
                "--file"
            )
        else:
            self._sql.execute("INSERT OR REPLACE INTO records VALUES (?, ?)", (key, value))
        self._held += (not now) - (not value)


def _cure(error: Exception) -> str:
    if "locked" in str(error):
        return "another store has it open; stop that one, or take another file (--file PATH)"
    if "not a database" in str(error) or "damaged" in str(error) or "malformed" in str(error):
        return f"{error}: no store's file, or a damaged one; take another file"
    return (
        f"{getattr(error, 'strerror', None) or error}; take a file in a folder that exists, can be "
        "written and is not full"
    )
