"""The errors of this package that a caller may want to tell apart, and the words that messages
share. A wrong value given by a user is a plain `ValueError`.
"""

from __future__ import annotations

from collections.abc import Sequence

PAGE = "docs/troubleshooting.md"

UNREADABLE = (
    *(ValueError, KeyError, TypeError, IndexError, AttributeError),
    *(OverflowError, RecursionError),
)
"""The exceptions that reading a value of JSON of unknown origin can raise."""


def see(anchor: str) -> str:
    """The end of a message whose cause and cure stand in PAGE, in the section with this anchor.

    >>> see("no-store")
    ' (docs/troubleshooting.md#no-store)'
    """
    return f" ({PAGE}#{anchor})"


def counted(number: int, word: str, plural: str = "") -> str:
    """`1 shard`, `2 shards`; `plural` where it is not the word with an s.

    >>> counted(1, "copy", "copies"), counted(1000, "step")
    ('1 copy', '1,000 steps')
    """
    return f"{number:,} {word if number == 1 else plural or f'{word}s'}"


def first_few(names: Sequence[str], most: int = 4) -> str:
    """The first names of many.

    >>> first_few(["a", "b"]), first_few(["a", "b", "c"], most=2)
    ('a, b', 'a, b ...')
    """
    return ", ".join(names[:most]) + (" ..." if len(names) > most else "")


def size(count: float) -> str:
    """A number of bytes in decimal units, with three digits.

    >>> size(999), size(11_900_000)
    ('999 B', '11.9 MB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 999.5:  # 999.6 is 1 of the next
            return f"{count:.3g} {unit}" if unit != "B" else f"{count:.0f} B"
        count /= 1000
    return f"{count:.3g} TB"


class PeerLost(RuntimeError):
    """A peer island died or was silent for longer than the timeout. What was in flight has not been
    applied. Uncaught, it ends Python with status 75 (`status.end_by_errors`).

    Attributes:
        unsaved: this island then failed to save what it has (a full disk): uncaught, the status is
            1, since a start from its last checkpoint would lose steps.

    Example:
        >>> from fsdp_demo import PeerLost
        >>> issubclass(PeerLost, RuntimeError)
        True
    """

    unsaved = False


class StoreSilent(PeerLost):
    """The store did not answer in time, or is gone. What was asked may have happened or not."""


class WireError(RuntimeError):
    """A message that is torn, of another configuration, version or step. Nothing of it has been
    applied.

    Example:
        >>> from fsdp_demo import WireError
        >>> issubclass(WireError, RuntimeError)
        True
    """


class Mismatch(WireError):
    """Islands do not do the same: other steps, another order of calls, another configuration, or
    replicas that are no longer equal.

    To start again does not help: somebody must change something first. `guard` ends with status 78,
    not 75.

    Example:
        >>> from fsdp_demo import Mismatch, WireError
        >>> issubclass(Mismatch, WireError)
        True
    """


class NotFinite(RuntimeError):
    """Values that are needed hold NaN or Inf: a replica that does not come back by itself, or a
    checkpoint that is not saved. No other replica has taken anything of them.

    Example:
        >>> from fsdp_demo import NotFinite
        >>> issubclass(NotFinite, RuntimeError)
        True
    """


class Stopped(RuntimeError):
    """An island asked to stop (`request_stop`, SIGTERM); all ranks of this island stand after the
    same step.

    Example:
        >>> from fsdp_demo import Stopped
        >>> issubclass(Stopped, RuntimeError)
        True
    """


class NeedsDecision(ValueError):
    """A run cannot go on by itself: the sentence says what was found and what there is to choose
    from. Uncaught, it ends Python with status 78, without a traceback (`status.end_by_errors`).

    Example:
        >>> from fsdp_demo import NeedsDecision
        >>> issubclass(NeedsDecision, ValueError)
        True
    """


class NotSaveable(ValueError):
    """A value that no checkpoint can hold, such as a list in an optimizer's state."""


class Superseded(RuntimeError):
    """Another life of this run has begun in the folder: this process must write there no more."""


def as_disk_error(error: Exception) -> Exception:
    """An OSError for what writers raise on a full disk, whichever class it has; all else as it is.

    safetensors says "I/O error ... (os error 28)", `torch.save` "enforce fail at
    inline_container.cc" or "PytorchStreamWriter failed".
    """
    text = str(error)
    theirs = type(error).__name__ == "SafetensorError" and "os error" in text
    torchs = isinstance(error, RuntimeError) and (
        "inline_container" in text or "PytorchStreamWriter" in text
    )
    return (
        OSError(f"cannot be written: {text.splitlines()[0][:200]}") if theirs or torchs else error
    )
