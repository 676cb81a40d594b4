"""``tinyedge devices``: what there is on this machine, and why something is not usable."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from .options import json_flag, table

HELP = "list the devices of this machine"


def arguments(parser: argparse.ArgumentParser) -> None:
    json_flag(parser)


def run(a: argparse.Namespace) -> int:
    from ..drivers.device import probe

    found = probe()
    if a.json:
        print(json.dumps([asdict(f) for f in found]))
    else:
        rows = [[f.name, "yes" if f.usable else "no", f.description, f.reason] for f in found]
        print(table(("device", "usable", "description", "why not"), rows))
    return 0
