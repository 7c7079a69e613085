"""Two TUN devices, one in each of two namespaces, and the packets between them: at a rate, after a delay."""

from __future__ import annotations

import collections
import ctypes
import fcntl
import os
import selectors
import struct
import subprocess
import sys
import time

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_CLONE_NEWNET = 0x40000000


def device(namespace: str, address: str) -> int:
    """A TUN device inside a namespace; this process goes there to make it, and stays connected to it."""
    libc = ctypes.CDLL(None, use_errno=True)
    back = os.open("/proc/self/ns/net", os.O_RDONLY)
    there = os.open(f"/var/run/netns/{namespace}", os.O_RDONLY)
    if libc.setns(there, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH", b"eth0", _IFF_TUN | _IFF_NO_PI))
    for words in (f"addr add {address}/24 dev eth0", "link set eth0 mtu 16000 txqueuelen 5000 up"):
        subprocess.run(["ip", *words.split()], check=True)
    libc.setns(back, _CLONE_NEWNET)
    return tun


def main() -> None:
    first, second, rate, delay = sys.argv[1], sys.argv[2], float(sys.argv[3]) * 1e6 / 8, float(sys.argv[4]) / 1e3
    ends = [device(first, "10.77.0.1"), device(second, "10.77.0.2")]
    print("ready", flush=True)
    chosen = selectors.DefaultSelector()
    queues = [collections.deque[tuple[float, bytes]]() for _ in ends]
    free = [0.0, 0.0]
    for number, end in enumerate(ends):
        chosen.register(end, selectors.EVENT_READ, number)
    while True:
        now = time.monotonic()
        due = min((queue[0][0] for queue in queues if queue), default=now + 0.05)
        for key, _ in chosen.select(max(0.0, due - now)):
            number = key.data
            for _ in range(64):
                try:
                    packet = os.read(ends[number], 65536)
                except BlockingIOError:
                    break
                now = time.monotonic()
                free[number] = max(free[number], now) + len(packet) / rate
                queues[number].append((free[number] + delay, packet))
        now = time.monotonic()
        for number, queue in enumerate(queues):
            while queue and queue[0][0] <= now:
                try:
                    os.write(ends[1 - number], queue[0][1])
                except BlockingIOError:
                    break
                queue.popleft()


if __name__ == "__main__":
    main()
