"""A worker with the protocol of `outcore.explore.worker` that needs no torch: it does what the name of its job says."""

from __future__ import annotations

import json
import sys
import time


def say(**message: object) -> None:
    print(json.dumps(message), flush=True)


def explore(settings: dict[str, object]) -> None:
    job = str(settings["job"])
    if job == "blocks":
        time.sleep(1000)
    if job == "dies":
        print("out of luck", file=sys.stderr, flush=True)
        sys.exit(3)
    if job == "wrong":
        say(trouble={"kind": "ValueError", "message": "no such layer", "place": "", "trace": ""})
        return
    say(files=["/a/job.py", "/a/other.py"])
    say(pieces={"about": {"batch": settings["batch"], "image": settings["image"]}, "graph": 1})
    say(pieces={"plans": {"complete": True}})
    say(done=True)


def main() -> None:
    for line in sys.stdin:
        request = json.loads(line)
        if "explore" in request:
            explore(request["explore"])
        elif "slow" in request["simulate"]["change"]:
            continue
        elif "wrong" in request["simulate"]["change"]:
            say(answer=request["id"], error="no block 'wrong'")
        else:
            say(answer=request["id"], value=request["simulate"])


if __name__ == "__main__":
    main()
