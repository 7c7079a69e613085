"""Makes the pictures of `outcore explore` in docs/pictures anew: two exported pages and a live one, panel by panel.

    python docs/make_pictures.py [FOLDER [PAGE]]        (about six minutes on two cores)

The jobs are here, so that anyone gets the same pages: a ResNet-50 that fits a device, a U-Net that does not, and a
small U-Net (page `live`) of which a step and a run are measured on this machine, which should have nothing else to do.
A browser without a window opens them (chromium, chromedriver and selenium are needed).
"""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PICTURES = Path(__file__).parent / "pictures"
RESNET = """import torch
from torch import Tensor, nn


class Bottleneck(nn.Module):
    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * width)
        self.relu = nn.ReLU(inplace=True)
        self.short = nn.Identity()
        if stride > 1 or channels != 4 * width:
            self.short = nn.Sequential(nn.Conv2d(channels, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return self.relu(y + self.short(x))


def layer(channels: int, width: int, blocks: int, stride: int) -> nn.Sequential:
    rest = [Bottleneck(4 * width, width, 1) for _ in range(blocks - 1)]
    return nn.Sequential(Bottleneck(channels, width, stride), *rest)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True))
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.layer1 = layer(64, 64, 3, 1)
        self.layer2 = layer(256, 128, 4, 2)
        self.layer3 = layer(512, 256, 6, 2)
        self.layer4 = layer(1024, 512, 3, 2)
        self.head = nn.Linear(2048, 1000)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.stem(x))
        x = self.layer1(x)
        x = self.layer2(x)
        x = self.layer3(x)
        x = self.layer4(x)
        return self.head(x.mean((2, 3)))


size = 64
model = ResNet
loss = nn.functional.cross_entropy


def batch(count):
    return torch.randn(count, 3, 224, 224), torch.randint(1000, (count,))


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
"""
UNET = """import torch
from outcore.models import UNet

loss = torch.nn.functional.cross_entropy
optimizer = torch.optim.Adam


def model():
    return UNet(3, 2, width=64)


def batch(size):
    return torch.rand(size, 3, 4096, 4096), torch.randint(2, (size, 4096, 4096))
"""
LIVE = """import torch
from outcore.models import UNet

size = 2
loss = torch.nn.functional.cross_entropy


def model():
    return UNet(3, 2, width=16)


def batch(count):
    images = torch.rand(count, 3, 128, 128)
    return images, (images.mean(1) > 0.5).long()


def optimizer(parameters):
    return torch.optim.Adam(parameters, lr=1e-3)
"""
PAGES = {"resnet50": RESNET, "toolarge": UNET}
SHOTS = (
    ("resnet50", "overview", "explore-overview", ""),
    ("resnet50", "code", "explore-code", "line:x = self.layer3(x)"),
    ("toolarge", "graph", "explore-graph", "button:Time"),
    ("resnet50", "breakdown", "explore-breakdown", "button:Saved for backward,Tree map"),
    ("toolarge", "timeline", "explore-timeline", ""),
    ("toolarge", "plan", "explore-plan", ""),
    ("toolarge", "overview", "explore-overview-dark", "dark"),
)
"""Page, panel, picture, and what is done before it is taken."""
_PRESS = """const shown = [...document.querySelectorAll('#panels section:not([hidden]) button')];
shown.find((b) => b.textContent.trim().startsWith(arguments[0])).click()"""
_LINE = """const rows = [...document.querySelectorAll('.code .costs')];
const row = rows.find((r) => r.textContent.includes(arguments[0]));
row.scrollIntoView({block: 'center'}); row.click()"""


def export(folder: Path, name: str, text: str) -> Path:
    """The page of a job, as a file."""
    (folder / f"{name}.py").write_text(text, encoding="utf-8")
    page = folder / f"{name}.html"
    words = ["explore", f"{name}.py", "--on", "a100-40gb", "--seconds", "120", "--export", page.name]
    subprocess.run([sys.executable, "-m", "outcore", *words], cwd=folder, check=True)
    return page


def photograph(driver: Any, page: Path, panel: str, picture: Path, before: str) -> None:
    """One panel of a page."""
    scheme = "dark" if before == "dark" else "light"
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    driver.get("about:blank")
    driver.get(f"{page.as_uri()}#{panel}")
    time.sleep(1.0)
    kind, _, what = before.partition(":")
    if kind == "button":
        for name in what.split(","):
            driver.execute_script(_PRESS, name)
    elif kind == "line":
        driver.execute_script(_LINE, what)
    time.sleep(1.0)
    save(driver, picture)


@contextmanager
def served(folder: Path, name: str) -> Iterator[str]:
    """The address of a job's live page."""
    words = [sys.executable, "-m", "outcore", "explore", name, "--no-open"]
    with subprocess.Popen(words, cwd=folder, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            found = re.search(r"http://127\.0\.0\.1:\d+/\S+/", server.stdout.readline())
            assert found is not None, server.stdout.read()
            yield found[0]
            server.send_signal(signal.SIGINT)
            server.wait(20)
        finally:
            server.kill()


def photograph_live(driver: Any, work: Path, folder: Path) -> None:
    """A step under the page's plan, predicted and measured; and a run of the same job."""
    (work / "unet.py").write_text(LIVE, encoding="utf-8")
    with served(work, "unet.py") as address:
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
        driver.get(f"{address}#timeline")
        until(driver, "document.getElementById('state').textContent.includes('up to date')")
        driver.execute_script("document.querySelector('.measure').click()")
        time.sleep(1.0)
        until(driver, "document.querySelector('.measure').disabled === false")
        time.sleep(1.0)
        save(driver, folder / "explore-measured.png")
        train = ["train", "unet.py", "--steps", "60", "--device", "cpu"]
        subprocess.run([sys.executable, "-m", "outcore", *train], cwd=work, check=True)
        driver.execute_script("document.getElementById('tab-run').click()")
        until(driver, "document.querySelector('.run-head')?.textContent.includes('finished') === true")
        time.sleep(1.0)
        save(driver, folder / "explore-run.png")


def until(driver: Any, expression: str, limit_s: float = 180.0) -> None:
    """Wait for a page."""
    end = time.monotonic() + limit_s
    while not driver.execute_script(f"return {expression}"):
        if time.monotonic() > end:
            raise TimeoutError(f"never: {expression}")
        time.sleep(0.1)


def save(driver: Any, picture: Path) -> None:
    """What the browser shows, as a file."""
    driver.save_screenshot(str(picture))
    print(f"wrote {picture}")


def main(folder: Path, only: str = "") -> None:
    """Take all pictures, or those of one page."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = str(shutil.which("chromium"))
    quiet = ("--no-first-run", "--disable-quic", "--disable-sync", "--disable-background-networking")
    plain = ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1440,900")
    for flag in (*plain, *quiet, "--disable-component-update"):
        options.add_argument(flag)
    with tempfile.TemporaryDirectory() as work:
        pages = {name: export(Path(work), name, text) for name, text in PAGES.items() if only in ("", name)}
        driver = webdriver.Chrome(options=options, service=Service(str(shutil.which("chromedriver"))))
        try:
            driver.execute_cdp_cmd(
                "Emulation.setDeviceMetricsOverride",
                {"width": 1440, "height": 900, "deviceScaleFactor": 1, "mobile": False},
            )
            for page, panel, picture, before in (shot for shot in SHOTS if shot[0] in pages):
                photograph(driver, pages[page], panel, folder / f"{picture}.png", before)
            if only in ("", "live"):
                photograph_live(driver, Path(work), folder)
        finally:
            driver.quit()


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURES, *sys.argv[2:])
