"""A cloud's notice that a spot machine will be taken away, for `launch --notice`: two minutes
before the machine ends (AWS), or half a minute (Google), this process gets SIGTERM.

Sources: AWS, "Spot Instance interruption notices" (instance metadata, version 2); Google, "Detect
if a VM was preempted". The variables that name another address are those of their own tools.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable

PERIOD = 5.0  # seconds between two questions, as AWS recommends


def _ask(url: str, headers: dict[str, str], method: str = "GET") -> str:
    """The answer of a metadata service, which no proxy stands before; "" where it has none (404).

    Raises:
        OSError: it does not answer.
    """
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    request = urllib.request.Request(url, headers=headers, method=method)
    try:
        with opener.open(request, timeout=PERIOD) as answer:
            return str(answer.read(4096), errors="replace").strip()
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return ""
        raise


def _aws() -> bool:
    default = "http://169.254.169.254"
    place = os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT", default).rstrip("/")
    seconds = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
    token = {"X-aws-ec2-metadata-token": _ask(f"{place}/latest/api/token", seconds, "PUT")}
    return bool(_ask(f"{place}/latest/meta-data/spot/instance-action", token))


def _gcp() -> bool:
    place = os.environ.get("GCE_METADATA_HOST", "metadata.google.internal")
    path = f"http://{place}/computeMetadata/v1/instance/preempted"
    return _ask(path, {"Metadata-Flavor": "Google"}) == "TRUE"


def watch(source: str) -> None:
    """Call `wait` in a thread, for `source`: "aws", "gcp", or a command of the shell."""
    threading.Thread(target=wait, args=(source,), name="notice", daemon=True).start()


def wait(source: str, pause: Callable[[float], None] = time.sleep) -> None:
    """Ask `source` until it says that this machine ends (a command by status 0), and send SIGTERM
    to this process then. A source that cannot be asked is named once, and asked on.
    """

    def command() -> bool:
        done = subprocess.run(source, shell=True, stdin=subprocess.DEVNULL, timeout=60)
        return done.returncode == 0

    noticed: Callable[[], bool] = {"aws": _aws, "gcp": _gcp}.get(source, command)
    said = taken = False
    while not taken:
        pause(PERIOD)
        try:
            taken = noticed()
        except (OSError, subprocess.TimeoutExpired) as error:
            if not said:
                text = f"--notice {source} cannot be asked ({error}); it is asked on"
                sys.stderr.write(f"fsdp_demo.launch: {text}\n")
            said = True
    sys.stderr.write(f"fsdp_demo.launch: --notice {source}: this machine is taken away\n")
    os.kill(os.getpid(), signal.SIGTERM)
