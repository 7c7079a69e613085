"""Stand-ins for hosts: network namespaces joined by a bridge or by TUN devices, with a rate and a delay.

A veth pair with a token bucket (tc tbf) limits the rate of each host. Where the kernel has no netem there is no delay,
so a delayed link is two TUN devices and a process that hands each packet over when its time has come. Needs root; only
addresses of 10.77.0.0/24 are used, inside the namespaces.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator

__all__ = ["hosts"]


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


@contextlib.contextmanager
def hosts(count: int, rate_mbit: float, delay_ms: float = 0.0) -> Iterator[list[str]]:
    """Namespaces, each one host; removed at the end."""
    names = [f"outcore{number}" for number in range(count)]
    bridge = "outcorebr"
    forwarder: subprocess.Popen[bytes] | None = None
    try:
        for name in names:
            _run("ip", "netns", "add", name)
            _run("ip", "netns", "exec", name, "ip", "link", "set", "lo", "up")
        if delay_ms:
            forwarder = _delayed(names, rate_mbit, delay_ms)
        else:
            _run("ip", "netns", "add", bridge)
            _run("ip", "netns", "exec", bridge, "ip", "link", "add", "br0", "type", "bridge")
            _run("ip", "netns", "exec", bridge, "ip", "link", "set", "br0", "up")
            for number, name in enumerate(names):
                inner, outer = "eth0", f"oc{number}"
                _run("ip", "link", "add", outer, "netns", bridge, "type", "veth", "peer", "name", inner, "netns", name)
                _run("ip", "netns", "exec", bridge, "ip", "link", "set", outer, "master", "br0")
                _run("ip", "netns", "exec", bridge, "ip", "link", "set", outer, "up")
                _run("ip", "netns", "exec", name, "ip", "addr", "add", f"10.77.0.{number + 1}/24", "dev", inner)
                _run("ip", "netns", "exec", name, "ip", "link", "set", inner, "up")
                burst = str(max(65536, int(rate_mbit * 1e6 / 8 / 250)))
                limit = ["rate", f"{rate_mbit:g}mbit", "burst", burst, "latency", "50ms"]
                _run("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", inner, "root", "tbf", *limit)
        yield names
    finally:
        if forwarder is not None:
            forwarder.terminate()
            forwarder.wait()
        for name in (*names, bridge):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _delayed(names: list[str], rate_mbit: float, delay_ms: float) -> subprocess.Popen[bytes]:
    import sys
    from pathlib import Path

    if len(names) != 2:
        raise ValueError("a delayed link joins two hosts")
    script = Path(__file__).with_name("delayed_link.py")
    made = subprocess.Popen(
        [sys.executable, str(script), *names, str(rate_mbit), str(delay_ms)], stdout=subprocess.PIPE
    )
    assert made.stdout is not None
    made.stdout.readline()
    return made
