"""What a user gets wrong ends a recipe with one message, not with a traceback of each rank."""

from __future__ import annotations

import difflib
import inspect
import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from transformers import HfArgumentParser

import fsdp_demo
from fsdp_demo import ExchangeConfig, Mismatch, NeedsDecision, PeerLost
from fsdp_demo.status import DECIDE, SAVED, leave, status_of, tell_launcher

WRONG_USE = 2
"""The status of argparse."""

AFTER = 5.0
"""Seconds that other ranks leave to rank 0, which says the same: its launcher ends them then."""

_PACKAGE = Path(fsdp_demo.__file__).parent
_FOLDERS = (_PACKAGE, _PACKAGE.with_name("deepspeed_ext"), Path(__file__).resolve().parent)


def parse(parser: HfArgumentParser) -> tuple[Any, ...]:
    """The dataclasses of the command line.

    Raises:
        ValueError: an option that there is not; proposes the nearest, or `--set` for a setting of
            the exchange.
    """
    *found, left = parser.parse_args_into_dataclasses(return_remaining_strings=True)
    if not left:
        return tuple(found)
    name, _, value = left[0].partition("=")
    key = name.lstrip("-").replace("-", "_")
    settings = {
        k for make in fsdp_demo.presets().values() for k in inspect.signature(make).parameters
    }
    if name.startswith("--") and (
        key in settings or key in ExchangeConfig.__dataclass_fields__ or "." in key
    ):
        given = value or next((word for word in left[1:2] if not word.startswith("-")), "VALUE")
        raise ValueError(
            f"{name} is no option: a setting of the exchange is written --set {key}={given}"
        )
    options = [o for action in parser._actions for o in action.option_strings]
    near = difflib.get_close_matches(name, options, n=1)
    meant = f"did you mean {near[0]}?" if near else "--help lists them"
    raise ValueError(f"{' '.join(left)}: there is no such option; {meant}")


def warn_unsaved(args: Any, rank: int) -> None:
    """Say that `--resume` alone writes nothing. rank: inside the island; the first one speaks."""
    if args.resume and not args.save_every and rank == 0:
        logging.getLogger(__name__).warning(
            "no checkpoints are written: a run that loses all islands begins again at step 0; "
            "add --save-every 100"
        )


@contextmanager
def plainly() -> Iterator[None]:
    """Run a script so that an error that a person can mend ends it with the sentence alone: status
    78 where islands do not do the same or somebody must choose, 75 where a peer did not come or the
    store does not answer (1 where this island's save failed then), 2 for a wrong value. Any other
    error stays what it is.
    """
    try:
        yield
    except (NeedsDecision, Mismatch) as error:
        _end(error, DECIDE)
    except PeerLost as error:
        _end(error, status_of(error))
    except (ValueError, FileNotFoundError) as error:
        if not _own(error.__traceback__):
            raise
        _end(error, WRONG_USE)


def _own(trace: TracebackType | None) -> bool:
    """Whether the innermost frame is of this package or a recipe, whose ValueErrors are for
    users.
    """
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return False
    file = Path(trace.tb_frame.f_code.co_filename).resolve()
    return any(file.is_relative_to(folder) for folder in _FOLDERS)


def _end(error: Exception, status: int) -> NoReturn:
    if status in (SAVED, DECIDE):
        tell_launcher(int(os.environ.get("RANK", "0")), status)
    if int(os.environ.get("RANK", "0")):
        time.sleep(AFTER)
    print(f"{Path(sys.argv[0]).name}: error: {error}", file=sys.stderr, flush=True)
    leave(status)
