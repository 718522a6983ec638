"""``python -m server.many_mains JSON``: run the launcher's main with each command line of a JSON list, and print after each
what it returned. Most of a start is importing, which is done once here."""

from __future__ import annotations

import json
import sys

from sglang_ssd.launch_server import main

for argv in json.loads(sys.argv[1]):
    print("returned", main(argv), flush=True)
