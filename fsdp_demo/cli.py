"""The command `fsdp-demo`: serve a store, rehearse islands on one machine, show presets, look into
checkpoints, export a model.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from .commands import report
from .errors import PeerLost
from .version import __version__

USAGE_ERROR = 2

_BIND_HELP = (
    "a private address of this machine; port 0 picks a free one; zmq:// keeps what it is told in a "
    "file, and knows ISLAND_TOKEN"
)
_REHEARSE_USAGE = "fsdp-demo rehearse --islands N --procs P [options] -- SCRIPT ARGS"


def store(args: argparse.Namespace) -> int:
    """Serve a store until SIGINT or SIGTERM."""
    from .comm.address import join_address
    from .launch.store import bound_memory

    # Blocked before the store starts its threads, which inherit it: the signals wait for `sigwait`
    # below.
    signals = {signal.SIGINT, signal.SIGTERM}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        served = _store(args)
    except BaseException:
        # whoever called main() in a process of its own goes on
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        raise
    bound_memory()
    for warning in served.warnings:
        print(f"fsdp-demo store: WARNING: {warning}", file=sys.stderr, flush=True)
    if args.port_file:
        # In one piece, so that who waits for the file never reads half a number.
        part = Path(f"{args.port_file}.part")
        part.write_text(f"{served.port}\n")
        part.replace(args.port_file)
    listening = join_address(served.host, served.port)
    if not args.quiet:
        kept = f", keys in {served.file}" if served.file else ""
        print(
            f"store listening on {listening}{kept}; on every island: export "
            f"ISLAND_ENDPOINT={served.endpoint}",
            flush=True,
        )
    served.serve_until(signals)
    return 0


def _store(args: argparse.Namespace) -> Any:
    """The store that `--bind` asks for."""
    from .comm import environment
    from .comm.stores import FILE, SCHEME
    from .launch.store import serve

    token = environment.token(os.environ)
    if args.bind.startswith(SCHEME):
        from .launch.durable_store import DurableStore

        return DurableStore(args.bind, args.file or FILE, token)
    if args.file:
        raise ValueError(
            f"--file {args.file}: this store keeps nothing in a file; take --bind "
            f"{SCHEME}{args.bind}"
        )
    return serve(args.bind, token)


def status(args: argparse.Namespace) -> int:
    """Say who the members of a run are and how far they are; 1 if nobody answers."""
    from .comm.look import members, text
    from .comm.topology import Topology

    topology = Topology.from_env(
        {"ISLAND_COUNT": "2", "ISLAND_TRANSPORT": "zeromq", **os.environ, "ISLAND_RANK": "0"}
    )
    found = members(topology.open_store(10.0), topology.run, topology.token)
    print(json.dumps(found, indent=2) if args.json else text(found))
    return 0 if any(not one.get("silent") for one in found["members"]) else 1


def rehearse(args: argparse.Namespace) -> int:
    """Run N islands on this machine and return the worst exit status."""
    from .comm.link import Link, parse_rate, parse_rtt
    from .launch.rehearse import Rehearsal
    from .launch.rehearse import rehearse as run

    link = None
    if args.link is not None or args.rtt is not None:
        try:
            link = (
                Link.parse(args.link)
                if args.link and "," in args.link
                else Link(args.link and parse_rate(args.link), 0.0)
            )
            link = Link(link.bits_per_second, parse_rtt(args.rtt)) if args.rtt else link
        except ValueError as error:
            raise ValueError(f"--link/--rtt: {error}") from None
    return run(
        Rehearsal(
            islands=args.islands,
            procs=args.procs,
            script=tuple(args.script),
            launcher=args.launcher,
            link=link,
            run=args.run,
            cpu=args.cpu,
            grace=args.grace,
            restarts=args.restarts,
            resume_args=args.resume_args,
            fork=args.fork,
        )
    )


def presets(args: argparse.Namespace) -> int:
    """List the presets, the recommended ones first, or describe one."""
    import fsdp_demo

    from .config.presets import RECOMMENDED, UNPUBLISHED

    known = fsdp_demo.presets()
    if args.name is None:
        width = max(map(len, known))
        for name in sorted(known, key=lambda name: name not in RECOMMENDED):
            group = "recommended" if name in RECOMMENDED else UNPUBLISHED.get(name, "paper")
            print(
                f"{name:{width}}  {group:11}  "
                f"{(inspect.getdoc(known[name]) or '').partition(chr(10))[0]}"
            )
        return 0
    config = fsdp_demo.preset(args.name)  # a wrong name: ValueError with the nearest right one
    if args.yaml:
        print(config.to_yaml(), end="")
    else:
        takes = inspect.signature(known[args.name]).parameters.items()
        print(inspect.getdoc(known[args.name]) or "")
        print("\nkeywords and defaults: " + ", ".join(f"{k}={p.default}" for k, p in takes))
        print(f"\n{config.describe()}")
    return 0


def inspect_checkpoint(args: argparse.Namespace) -> int:
    """Say what a checkpoint, or every checkpoint of a run, holds; 1 if one of them is not whole."""
    from .checkpoint.inspect import inspect as look
    from .checkpoint.inspect import shared, text

    found = look(args.checkpoint)
    if args.json:
        print(json.dumps(found, indent=2))
    else:
        print("\n\n".join(map(text, found)))
        if len(found) > 1:
            print(f"\n{shared(found)}")
    return 0 if all(one["complete"] for one in found) else 1


def export(args: argparse.Namespace) -> int:
    """Write a run's model as a folder for `from_pretrained`."""
    # on the CPU; else DeepSpeed, which transformers imports if it is there, warns that it found no
    # GPU
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        from .integrations.export.pretrained import export as write
    except ImportError as error:
        raise ValueError(
            f"export needs transformers ({error}): pip install 'fsdp_demo[hf]'"
        ) from None
    chosen = write(
        args.folder,
        args.out,
        step=args.step,
        island=args.island,
        model=args.model,
        tokenizer=args.tokenizer,
        push_to_hub=args.push_to_hub,
    )
    print(
        f"{args.out}: step {chosen.step}, {chosen.says}"
        + (f"; uploaded to {args.push_to_hub}" if args.push_to_hub else "")
    )
    return 0


def parser() -> argparse.ArgumentParser:
    """The command table."""
    top = argparse.ArgumentParser(
        prog="fsdp-demo", description="One model on several islands that a slow network joins."
    )
    top.add_argument("--version", action="version", version=f"fsdp-demo {__version__}")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)

    sub = commands.add_parser("store", help="serve the store where islands meet, until stopped")
    sub.add_argument("--bind", required=True, metavar="[zmq://]ADDR:PORT", help=_BIND_HELP)
    sub.add_argument(
        "--file",
        metavar="PATH",
        help="where a zmq:// store keeps its keys (default: fsdp_demo_store.sqlite in this folder)",
    )
    sub.add_argument(
        "--port-file", metavar="FILE", help="write the port into this file when the store listens"
    )
    sub.add_argument("--quiet", action="store_true", help="do not print where it listens")
    sub.set_defaults(run_command=store)

    sub = commands.add_parser(
        "rehearse",
        help="run several islands on this machine, as they would run on several",
        usage=_REHEARSE_USAGE,
    )
    sub.add_argument("--islands", type=int, required=True, metavar="N", help="number of islands")
    sub.add_argument(
        "--procs", type=int, required=True, metavar="P", help="processes (ranks) per island"
    )
    sub.add_argument(
        "--link",
        metavar="RATE",
        help="rate of each island's link, for example 100Mbit (default: not limited)",
    )
    sub.add_argument(
        "--rtt", metavar="TIME", help="round trip between islands, for example 40ms (default: 0)"
    )
    sub.add_argument(
        "--launcher",
        default="accelerate",
        choices=("accelerate", "torchrun", "deepspeed"),
        help="default: accelerate",
    )
    sub.add_argument("--run", default="rehearse", metavar="ID", help="run id (ISLAND_RUN)")
    sub.add_argument("--cpu", action="store_true", help="use the CPU even where there are GPUs")
    sub.add_argument(
        "--grace",
        type=float,
        default=40.0,
        metavar="SECONDS",
        help="left to the others when an island dies (default: 40)",
    )
    sub.add_argument(
        "--restarts",
        type=int,
        default=0,
        metavar="N",
        help="start an island that saved and left, or was killed, again",
    )
    sub.add_argument(
        "--resume-args", default="", metavar="ARGS", help="added to the script's arguments then"
    )
    sub.add_argument(
        "--no-fork",
        dest="fork",
        action="store_false",
        help="let each rank import by itself, where they would be forked after the imports",
    )
    sub.set_defaults(run_command=rehearse)

    sub = commands.add_parser(
        "status",
        help="say which islands take part in a run, and how far they are (ISLAND_ENDPOINT, "
        "ISLAND_RUN)",
    )
    sub.add_argument("--json", action="store_true", help="print one object")
    sub.set_defaults(run_command=status)

    sub = commands.add_parser("presets", help="list the methods, or show one")
    sub.add_argument("name", nargs="?", metavar="NAME", help="the preset to show")
    sub.add_argument(
        "--yaml", action="store_true", help="print it as yaml, to change and pass as a file"
    )
    sub.set_defaults(run_command=presets)

    sub = commands.add_parser(
        "inspect",
        help="say what a checkpoint holds: step, preset, islands, states and sizes, what is "
        "missing",
    )
    sub.add_argument(
        "checkpoint",
        metavar="CHECKPOINT",
        help="a checkpoint-N, or the folder of a run for all of its checkpoints",
    )
    sub.add_argument(
        "--json", action="store_true", help="print a list of objects, one per checkpoint"
    )
    sub.set_defaults(run_command=inspect_checkpoint)

    sub = commands.add_parser(
        "export",
        help="write a run's outer parameters as a folder for from_pretrained, with a model card",
    )
    sub.add_argument(
        "folder",
        metavar="RUN",
        help="output folder of the run, with those of all islands, or one checkpoint of it",
    )
    sub.add_argument("out", metavar="OUT", help="folder to write; new or empty")
    sub.add_argument(
        "--step",
        type=int,
        metavar="N",
        help="of the checkpoints (default: the newest that is whole)",
    )
    sub.add_argument("--island", type=int, metavar="I", help="this island's replica alone")
    sub.add_argument(
        "--model",
        metavar="CONFIG",
        help="config.json, folder or hub id of the architecture, if the checkpoints hold none",
    )
    sub.add_argument(
        "--tokenizer", metavar="ID", help="hub id or folder (default: the one saved with the run)"
    )
    sub.add_argument("--push-to-hub", metavar="REPO", help="upload the folder to this repository")
    sub.set_defaults(run_command=export)
    report.add(commands)
    return top


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit status (2 for what the user got wrong, 1 where the store
    does not answer or a file cannot be read or written).
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    script: list[str] = []
    if argv[:1] == ["rehearse"] and "--" in argv:
        # Everything after the first "--" is the script's, options and all.
        cut = argv.index("--")
        argv, script = argv[:cut], argv[cut + 1 :]
    args = parser().parse_args(argv, argparse.Namespace(script=script))
    try:
        return int(args.run_command(args))
    except ValueError as error:
        print(f"fsdp-demo: error: {error}", file=sys.stderr)
        return USAGE_ERROR
    except PeerLost as error:
        print(f"fsdp-demo: error: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # Whoever read the output is gone (`| head`); nothing more can be said, not even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except OSError as error:
        print(f"fsdp-demo: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
