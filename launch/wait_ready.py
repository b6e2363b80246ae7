"""Wait until the Dynamo frontend serves a model, then print a request that can be pasted into a shell."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
import urllib.error
import urllib.request
from typing import Any

# The frontend is on this machine: a proxy that the environment names has no part in it.
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
POLL_SECONDS = 0.5
REPORT_SECONDS = 15.0
SENTENCE = "Good morning. Every word of this was made on the fly."


def fetch(url: str) -> dict[str, Any] | None:
    """The JSON object at ``url``, or ``None`` while the frontend does not answer or is not healthy yet."""
    try:
        with DIRECT.open(url, timeout=5) as answer:
            document: dict[str, Any] = json.load(answer)
            return document
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return None


def served_model(base: str, wanted: str | None, workers: int) -> str | None:
    """The served model, once ``workers`` worker processes have registered.

    ``wanted`` names it where a shared discovery may list others too; otherwise it is the only one.
    """
    models = fetch(f"{base}/v1/models") or {"data": []}
    names = [model["id"] for model in models["data"]]
    if not names or (wanted is not None and wanted not in names):
        return None
    health = fetch(f"{base}/health") or {"instances": []}
    # A worker has one instance id, whatever the number of its endpoints.
    registered = {instance["instance_id"] for instance in health["instances"]}
    return (wanted or names[0]) if len(registered) >= workers else None


def curl(base: str, model: str) -> str:
    """A command that speaks with ``model`` into speech.wav."""
    body = shlex.quote(json.dumps({"model": model, "input": SENTENCE}))
    return f"curl {base}/v1/audio/speech -H 'Content-Type: application/json' -d {body} -o speech.wav"


def main() -> None:
    """Poll until ready, with a line now and then; whoever started this ends it when a server dies."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True, help="where the frontend listens, e.g. http://127.0.0.1:8000")
    parser.add_argument("--model", help="the served name to wait for (default: any)")
    parser.add_argument("--workers", type=int, default=1)
    arguments = parser.parse_args()

    start = reported = time.monotonic()
    while (model := served_model(arguments.url, arguments.model, arguments.workers)) is None:
        if time.monotonic() - reported >= REPORT_SECONDS:
            reported = time.monotonic()
            print(f"pega-omni: still starting ({reported - start:.0f} s)", file=sys.stderr, flush=True)
        time.sleep(POLL_SECONDS)
    print(f"\npega-omni: {model} is ready at {arguments.url}. Try:\n\n  {curl(arguments.url, model)}\n", flush=True)


if __name__ == "__main__":
    main()
