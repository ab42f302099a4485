"""A TCP relay on loopback: what passes is counted, and can be held, cut or reset. No root."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable

RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close with a reset


class Relay:
    """Listens on a port of 127.0.0.1 and passes on to another, any number of connections.

    Attributes:
        address, port: where it listens.
        forth, back: bytes that it has passed on to the target, and from it.
        change: what becomes of bytes that pass; (data, forth) -> data.
        wait: seconds that every piece of at most 64 KiB takes.
    """

    def __init__(self, port: int, host: str = "127.0.0.1"):
        self._target = (host, port)
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address, self.port = self._server.getsockname()
        self.forth = self.back = 0
        self._open = {True: threading.Event(), False: threading.Event()}  # forth, back
        self.let_go()
        self.change: Callable[[bytes, bool], bytes] = lambda data, forth: data
        self.wait = 0.0
        self._ends: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def hold(self, forth: bool = True, back: bool = True) -> None:
        """Pass on nothing more, and close nothing: a dead cable. Or one way only."""
        for event, held in ((self._open[True], forth), (self._open[False], back)):
            if held:
                event.clear()

    def let_go(self) -> None:
        """Pass on again."""
        for event in self._open.values():
            event.set()

    def cut(self, reset: bool = False) -> None:
        """End all connections, and take no more."""
        self._shut(self._server)
        for end in self._ends:
            if reset:
                with contextlib.suppress(OSError):
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            self._shut(end)
        self.let_go()

    def close(self) -> None:
        """End, with all threads."""
        self.cut()
        for thread in self._threads:
            thread.join(5.0)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._server.accept()
                far = socket.create_connection(self._target)
                self._ends += [near, far]
                for a, b, forth in ((near, far, True), (far, near, False)):
                    thread = threading.Thread(target=self._pass, args=(a, b, forth), daemon=True)
                    self._threads.append(thread)
                    thread.start()

    def _pass(self, source: socket.socket, target: socket.socket, forth: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self._open[forth].wait()
                if self.wait:
                    time.sleep(self.wait)
                target.sendall(self.change(data, forth))
                if forth:
                    self.forth += len(data)
                else:
                    self.back += len(data)
        self._shut(target)
        self._shut(source)

    @staticmethod
    def _shut(end: socket.socket) -> None:
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
        end.close()
