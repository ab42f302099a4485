"""A redis as the store: ISLAND_ENDPOINT=redis://[:password@]host:port[/number], for those who run
one. `pip install "redis>=5"`.

Every question is one script, which redis runs as a whole. Where no answer came it is repeated under
its number, until the deadline; the script remembers for an hour what it changed under that number,
so it acts once. Whether what was answered outlives redis is a matter of its configuration:
`appendonly yes` and `appendfsync always`. How much it holds is, too: `maxmemory`.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Sequence
from typing import Any

from ..errors import StoreSilent, see
from .address import split_endpoint
from .stores import BoundedStore, Identity, key_bytes, value_bytes

try:
    import redis
    from redis import backoff, retry
    from redis import exceptions as trouble
except ModuleNotFoundError as error:
    if error.name != "redis":
        raise
    raise ValueError(
        'ISLAND_ENDPOINT=redis://... needs the client of redis: pip install "redis>=5"'
    ) from error

log = logging.getLogger("fsdp_demo")

# seconds without an answer after which a question is repeated, and at most
FIRST, RARELY = 1.0, 8.0
AGAIN = 0.1  # seconds between two tries to connect
SPACE = b"{fsdp_demo}:"  # before all keys in redis; the braces keep them together in a cluster

_QUESTION = """
local store, client, key = KEYS[1], KEYS[2], KEYS[3]
local kind, name, number = ARGV[1], ARGV[2], tonumber(ARGV[3])
if kind == 'hello' then
  redis.call('SET', store, ARGV[4], 'NX')
  return {'done', redis.call('GET', store)}
end
if redis.call('GET', store) ~= name then return {'anew'} end
if kind == 'find' then
  local value = redis.call('GET', key)
  if value then return {'done', value} else return {'missing'} end
end
if kind == 'find_all' then
  local found = {'done'}
  for n = 3, #KEYS do found[n - 1] = redis.call('GET', KEYS[n]) or '' end
  return found
end
if kind == 'check' then
  for n = 3, #KEYS do
    if redis.call('EXISTS', KEYS[n]) == 0 then return {'done', '0'} end
  end
  return {'done', '1'}
end
local now, answer = redis.call('GET', key), ''
if kind == 'add' and ARGV[4] == '0' and tonumber(now or '') then return {'done', now} end
if kind == 'compare' and ARGV[4] == '' and ARGV[5] == '' and now then return {'done', now} end
local before = redis.call('HMGET', client, 'number', 'answer')
if before[1] and tonumber(before[1]) == number then return {'done', before[2]} end
if before[1] and tonumber(before[1]) > number then return {'late'} end
if kind == 'set' then
  redis.call('SET', key, ARGV[4])
elseif kind == 'add' then
  if now == '' then redis.call('SET', key, '0') end
  local sum = redis.pcall('INCRBY', key, ARGV[4])
  if type(sum) == 'table' then return {'refused', sum['err']} end
  answer = redis.call('GET', key)
elseif kind == 'delete' then
  answer = tostring(redis.call('DEL', key))
elseif not now and ARGV[4] ~= '' then
  answer = ARGV[4]
elseif (now or '') == ARGV[4] then
  redis.call('SET', key, ARGV[5])
  answer = ARGV[5]
else
  answer = now
end
redis.call('HSET', client, 'number', ARGV[3], 'answer', answer)
redis.call('EXPIRE', client, 3600)
return {'done', answer}
"""

_warned: set[str] = set()  # endpoints whose configuration this process has warned of


class Client:
    """One client: a thread asks at a time. A forked process becomes a client of its own at its
    first question.
    """

    def __init__(self, endpoint: str, password: str):
        self._where, self._place, self._password = endpoint, split_endpoint(endpoint), password
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._id = secrets.token_hex(16).encode()
        self._number = 0
        self._redis: Any = None
        self._patience = 0.0
        self.known = b""

    def ask(self, kind: str, keys: list[bytes], values: list[bytes], seconds: float) -> list[bytes]:
        """The answer to a question.

        Raises:
            StoreSilent: none came, or redis cannot keep the change or has lost what it held.
            ValueError: it refuses the question or the password.
        """
        if os.getpid() != self._pid:
            self._begin()
        end = time.monotonic() + seconds
        if not self._lock.acquire(timeout=max(seconds, 0.0)):
            raise StoreSilent(
                f"the store at {self._where} does not answer within {seconds:g} s: another thread "
                "waits for it"
            )
        try:
            if not self.known:
                self.known = self._answer(
                    "hello", [], [secrets.token_hex(16).encode()], end, seconds
                )[1]
                self._warn()
            return self._answer(kind, keys, values, end, seconds)
        finally:
            self._lock.release()

    def _answer(
        self, kind: str, keys: list[bytes], values: list[bytes], end: float, seconds: float
    ) -> list[bytes]:
        self._number += 1
        words = [
            SPACE + b"store",
            SPACE + b"client:" + self._id,
            *(SPACE + b"key:" + key for key in keys),
        ]
        words = [
            _QUESTION.encode(),
            b"%d" % len(words),
            *words,
            kind.encode(),
            self.known,
            b"%d" % self._number,
            *values,
        ]
        answer = self._until(words, end, seconds)
        if answer[0] == b"refused":
            raise ValueError(
                f"the store at {self._where} refuses: {answer[1].decode(errors='replace')}"
            )
        if answer[0] == b"anew":
            raise StoreSilent(
                f"the store at {self._where} cannot go on: it was made anew since, without what it "
                "held before"
            )
        return answer

    def _until(self, words: list[bytes], end: float, seconds: float) -> list[bytes]:
        """Ask until there is an answer."""
        patience, why = FIRST, "no time was left"
        while (left := end - time.monotonic()) > 0:
            try:
                answer: list[bytes] = self._connected(min(left, patience)).execute_command(
                    "EVAL", *words
                )
                return answer
            except (
                trouble.AuthenticationError,
                trouble.AuthorizationError,
                trouble.NoPermissionError,
            ) as error:
                give = "give its password in ISLAND_ENDPOINT=redis://:PASSWORD@HOST:PORT"
                raise ValueError(f"the redis at {self._where} refuses: {error}; {give}") from None
            except (trouble.ConnectionError, trouble.TimeoutError) as error:
                why = str(error)[:160]
                if isinstance(error, trouble.TimeoutError):
                    patience = min(2 * patience, RARELY)
            except trouble.RedisError as error:
                # its disk or memory is full, or it is a copy that cannot write
                raise StoreSilent(
                    f"the store at {self._where} cannot go on: {str(error)[:160]}"
                ) from None
            self.drop()
            time.sleep(max(min(AGAIN, end - time.monotonic()), 0.0))
        raise StoreSilent(
            f"the store at {self._where} does not answer within {seconds:g} s ({why})"
        )

    def _connected(self, patience: float) -> Any:
        """A connection with this timeout."""
        if self._redis is None or self._patience != patience:
            self.drop()
            place, never = self._place, retry.Retry(backoff.NoBackoff(), 0)
            waits = {"socket_timeout": patience, "socket_connect_timeout": patience, "retry": never}
            self._redis = redis.Redis(
                place.host, place.port, place.database, self._password or None, **waits
            )
            self._patience = patience
        return self._redis

    def drop(self) -> None:
        """Close the connection."""
        if self._redis is not None:
            self._redis.close()
            self._redis = None

    def _warn(self) -> None:
        """Say once if redis may forget what it has answered."""
        if self._where in _warned:
            return
        _warned.add(self._where)
        try:
            found = self._redis.config_get("append*")
            on, sync = (found.get(name, "") for name in ("appendonly", "appendfsync"))
        except trouble.RedisError:  # it does not tell everybody
            return
        if on != "yes" or sync != "always":
            log.warning(
                "the redis at %s may forget what it has answered when it ends (appendonly %s, "
                "appendfsync %s): set appendonly yes and "
                "appendfsync always",
                *(self._where, on, sync),
            )


class RedisStore(BoundedStore):
    """The store at `redis://host:port/number`; connects at the first question."""

    def __init__(self, endpoint: str, password: str = "", deadline: float = 15.0):
        super().__init__(endpoint, deadline)
        self._client = Client(endpoint, password)

    def _ask(self, kind: str, keys: list[bytes], *values: bytes) -> list[bytes]:
        return self._client.ask(kind, keys, list(values), self.deadline)

    def find(self, key: str) -> bytes | None:
        """See `BoundedStore`."""
        answer = self._ask("find", [key_bytes(key)])
        return None if answer[0] == b"missing" else answer[1]

    def find_all(self, keys: Sequence[str]) -> list[bytes]:
        """See `BoundedStore`: one question."""
        return self._ask("find_all", [key_bytes(key) for key in keys])[1:]

    def check(self, keys: list[str]) -> bool:
        """See `BoundedStore`."""
        return self._ask("check", [key_bytes(key) for key in keys])[1] == b"1"

    def set(self, key: str, value: str | bytes) -> None:
        """See `BoundedStore`."""
        self._ask("set", [key_bytes(key)], value_bytes(key, value))

    def add(self, key: str, amount: int) -> int:
        """See `BoundedStore`."""
        return int(self._ask("add", [key_bytes(key)], b"%d" % amount)[1])

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """See `BoundedStore`."""
        return self._ask(
            "compare", [key_bytes(key)], value_bytes(key, expected), value_bytes(key, desired)
        )[1]

    def delete_key(self, key: str) -> bool:
        """See `BoundedStore`."""
        return self._ask("delete", [key_bytes(key)])[1] == b"1"

    def identity(self) -> Identity:
        """Which store answers, asked anew; StoreSilent if it is another one than before. Redis does
        not count its starts: generation 0.
        """
        name = self._ask("hello", [], secrets.token_hex(16).encode())[1]
        if name != self._client.known:
            raise StoreSilent(
                f"the store at {self.where} was made anew since, without what it held "
                f"before{see('store-made-anew')}"
            )
        return Identity(name.decode(errors="replace"), 0)

    def close(self) -> None:
        """See `BoundedStore`."""
        self._client.drop()
