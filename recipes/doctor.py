"""`fsdp-demo doctor` as a script, for `fsdp-demo rehearse` and other launchers: rank 0 of each
island measures.

    fsdp-demo rehearse --islands 2 --procs 1 --cpu -- recipes/doctor.py --seconds 10
"""

import sys

from fsdp_demo.cli import main

if __name__ == "__main__":
    sys.exit(main(["doctor", *sys.argv[1:]]))
