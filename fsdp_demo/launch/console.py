"""Output of several islands on one terminal: whole lines with the island's name, and one progress
bar that survives.

A progress bar rewrites its line with carriage returns. Only the first island's bar is shown: in
place on a terminal, as a line now and then in a file.
"""

from __future__ import annotations

import codecs
import re
import shutil
import time
from typing import TextIO

BAR_EVERY = 10.0
"""Seconds between two lines of a progress bar where the output is no terminal."""

_END = re.compile(r"\r\n|\n|\r")


class Splitter:
    """Bytes of one island, in whatever pieces they come, into lines.

    >>> Splitter().feed(b"one\\n 10%\\r 20%\\rtwo", final=True)
    [('one', False), (' 10%', True), (' 20%', True), ('two', False)]
    """

    def __init__(self) -> None:
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.text = ""

    def feed(self, data: bytes, *, final: bool = False) -> list[tuple[str, bool]]:
        """Complete lines as (text, passing); a passing one ended in a carriage return and will be
        written over.
        """
        self.text += self.decoder.decode(data, final)
        lines, begin = [], 0
        for end in _END.finditer(self.text):
            if end.group() == "\r" and end.end() == len(self.text) and not final:
                break  # the line feed of a "\r\n" may come with the next piece
            lines.append((self.text[begin : end.start()], end.group() == "\r"))
            begin = end.end()
        self.text = self.text[begin:]
        if final and self.text:
            lines.append((self.text, False))
            self.text = ""
        return lines


class Console:
    """Writes prefixed lines to a stream; keeps a progress bar below them on a terminal."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.terminal = stream.isatty()
        self.bar = False  # is one on the last line of the terminal?
        self.next_bar = 0.0

    def note(self, text: str) -> None:
        """A line of the rehearsal itself."""
        self.show("rehearse", text)

    def show(self, name: str, text: str, *, passing: bool = False, first: bool = False) -> None:
        """One line of `name`; one that passes is shown only for the first island. A line that has
        the name already (`exchange/log_setup.py`) gets no second one.
        """
        text = text.removeprefix(f"[{name}] ")
        if not passing:
            self._write(f"{self._clear()}[{name}] {text}\n")
        elif first and text.strip():
            self._show_bar(f"[{name}] {text.strip()}")

    def _show_bar(self, text: str) -> None:
        if self.terminal:
            width = shutil.get_terminal_size().columns
            self._write(f"{self._clear()}{text[: width - 1]}")
            self.bar = True
        elif time.monotonic() >= self.next_bar:
            self.next_bar = time.monotonic() + BAR_EVERY
            self._write(f"{text}\n")

    def _clear(self) -> str:
        back = "\r\x1b[K" if self.bar else ""
        self.bar = False
        return back

    def _write(self, text: str) -> None:
        self.stream.write(text)
        self.stream.flush()
