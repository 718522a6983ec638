"""A link between this host and another network namespace, whose delay, loss and breaks are a test's.

The kernel's netem is not everywhere; a TUN device on either side and a thread that hands packets over is, for root.
"""

from __future__ import annotations

import fcntl
import os
import select
import shutil
import struct
import subprocess
import threading
import time
from collections import deque
from random import Random

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
HERE, THERE = "10.231.77.1", "10.231.77.2"


def why_no_link() -> str | None:
    """Why this machine cannot make a link, None when it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if not os.path.exists("/dev/net/tun"):
        return "this kernel has no TUN devices"
    if shutil.which("ip") is None:
        return "the command ip (iproute2) is missing"
    probe = subprocess.run(["ip", "netns", "add", f"ssd-probe-{os.getpid()}"], capture_output=True, text=True)
    if probe.returncode:
        return f"no network namespace can be made: {probe.stderr.strip()}"
    run("ip", "netns", "del", f"ssd-probe-{os.getpid()}")
    return None


class Link:
    """``HERE`` is this host and ``THERE`` the namespace. Every packet takes ``delay_s``, a share of them is lost, and all
    of them are while ``is_cut``."""

    def __init__(self, delay_s: float, loss: float, seed: int) -> None:
        self.namespace = f"ssd-{os.getpid()}"
        self.is_cut = False
        self.num_packets = self.num_lost = 0
        self._delay_s, self._loss, self._random = delay_s, loss, Random(seed)
        run("ip", "netns", "add", self.namespace)
        self._ends = [_tun(f"ssd{os.getpid() % 100_000}{side}") for side in "ab"]
        (here, self._here), (there, self._there) = self._ends
        run("ip", "link", "set", there, "netns", self.namespace)
        for prefix, device, address, peer in (([], here, HERE, THERE), (self.prefix(), there, THERE, HERE)):
            run(*prefix, "ip", "addr", "add", address, "peer", peer, "dev", device)
            run(*prefix, "ip", "link", "set", device, "up")
        run(*self.prefix(), "ip", "link", "set", "lo", "up")
        self._is_stopping = False
        self._thread = threading.Thread(target=self._relay, daemon=True)
        self._thread.start()

    def prefix(self) -> list[str]:
        """Runs the command that follows it on the other side."""
        return ["ip", "netns", "exec", self.namespace]

    def _relay(self) -> None:
        waiting: deque[tuple[float, int, bytes]] = deque()
        other = {self._here: self._there, self._there: self._here}
        while not self._is_stopping:
            timeout_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else 0.1
            for end in select.select(list(other), [], [], timeout_s)[0]:
                packet = os.read(end, 65536)
                self.num_packets += 1
                if self.is_cut or self._random.random() < self._loss:
                    self.num_lost += 1
                else:
                    waiting.append((time.monotonic() + self._delay_s, other[end], packet))
            while waiting and waiting[0][0] <= time.monotonic():
                _, end, packet = waiting.popleft()
                os.write(end, packet)

    def close(self) -> None:
        self._is_stopping = True
        self._thread.join()
        for _, end in self._ends:
            os.close(end)
        run("ip", "netns", "del", self.namespace)


def _tun(name: str) -> tuple[str, int]:
    end = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(end, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TUN | IFF_NO_PI))
    return name, end


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
