"""Stand-ins for hosts: network namespaces joined by a bridge or by TUN devices, with a rate and a delay.

A veth pair with a token bucket (tc tbf) limits the rate of each host. Where the kernel has no netem there is no delay,
so a delayed link is two TUN devices and a process that hands each packet over when its time has come. A command that
runs on a host also has a host name of its own, so that ranks there do not share memory with others. Needs root; only
addresses of 10.77.0.0/24 are used, inside the namespaces. Tests of runs over several hosts use them too.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

__all__ = ["address", "cut_off", "hosts", "on_host", "unavailable"]


_ETC = Path("/etc/netns")


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


def unavailable() -> str | None:
    """Why namespaces cannot be made here; None if they can."""
    if os.geteuid():
        return "network namespaces need root"
    name = f"outcoretry{os.getpid()}"
    try:
        _run("ip", "netns", "add", name)
        _run("ip", "netns", "exec", name, "tc", "qdisc", "show")
    except (OSError, subprocess.CalledProcessError) as error:
        return f"network namespaces cannot be made: {error}"
    finally:
        with contextlib.suppress(OSError):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return None


def address(number: int) -> str:
    """Of a host, by its number."""
    return f"10.77.0.{number + 1}"


def on_host(name: str, *words: str) -> list[str]:
    """A command as it is run on a host."""
    return ["ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c", 'hostname "$0"; exec "$@"', name, *words]


def cut_off(name: str) -> None:
    """Pull a host's cable: what it sends is lost, and nobody is told."""
    prefix, number = name.rstrip("0123456789"), name[len(name.rstrip("0123456789")) :]
    _run("ip", "netns", "exec", f"{prefix}br", "ip", "link", "set", f"oc{number}", "down")


@contextlib.contextmanager
def hosts(count: int, rate_mbit: float, delay_ms: float = 0.0, prefix: str = "outcore") -> Iterator[list[str]]:
    """Namespaces, each one host; removed at the end. Runs at the same time need prefixes of their own, without digits
    at the end."""
    names = [f"{prefix}{number}" for number in range(count)]
    bridge = f"{prefix}br"
    forwarder: subprocess.Popen[bytes] | None = None
    try:
        known = "".join(f"{address(number)} {name}\n" for number, name in enumerate(names))
        for name in names:
            _run("ip", "netns", "add", name)
            _run("ip", "netns", "exec", name, "ip", "link", "set", "lo", "up")
            # What lies here is seen as /etc by the commands of a namespace: hosts know each other by name.
            (_ETC / name).mkdir(parents=True, exist_ok=True)
            (_ETC / name / "hosts").write_text(f"127.0.0.1 localhost\n{known}")
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
                _run("ip", "netns", "exec", name, "ip", "addr", "add", f"{address(number)}/24", "dev", inner)
                _run("ip", "netns", "exec", name, "ip", "link", "set", inner, "up")
                # What is sent at once after a pause: no more than a real link would have moved in 0.25 ms.
                burst = str(max(16384, int(rate_mbit * 1e6 / 8 * 0.25e-3)))
                limit = ["rate", f"{rate_mbit:g}mbit", "burst", burst, "latency", "50ms"]
                _run("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", inner, "root", "tbf", *limit)
        yield names
    finally:
        if forwarder is not None:
            forwarder.terminate()
            forwarder.wait()
        for name in (*names, bridge):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
            shutil.rmtree(_ETC / name, ignore_errors=True)


def _delayed(names: list[str], rate_mbit: float, delay_ms: float) -> subprocess.Popen[bytes]:
    import sys

    if len(names) != 2:
        raise ValueError("a delayed link joins two hosts")
    script = Path(__file__).with_name("delayed_link.py")
    made = subprocess.Popen(
        [sys.executable, str(script), *names, str(rate_mbit), str(delay_ms)], stdout=subprocess.PIPE
    )
    assert made.stdout is not None
    made.stdout.readline()
    return made
