"""A real browser without a window, driven as a user would; tests that need one are skipped where there is none."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterator
from typing import Any

import pytest

PATIENCE_S = 60.0


def needs_browser() -> pytest.MarkDecorator:
    found = shutil.which("chromium") and shutil.which("chromedriver")
    try:
        import selenium  # noqa: F401
    except ImportError:
        return pytest.mark.skip(reason="selenium is not installed")
    return pytest.mark.skipif(not found, reason="no chromium and chromedriver here")


class Browser:
    """What a test does with a page."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def __call__(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def ask(self, expression: str) -> Any:
        return self(f"return {expression}")

    def text(self, selector: str) -> str:
        return str(self("return document.querySelector(arguments[0])?.textContent ?? ''", selector))

    def count(self, selector: str) -> int:
        return int(self("return document.querySelectorAll(arguments[0]).length", selector))

    def open(self, tab: str) -> None:
        self.click(f"#tab-{tab}")
        assert self.ask(f"document.getElementById('panel-{tab}').hidden") is False

    def click(self, selector: str, index: int = 0) -> None:
        from selenium.webdriver.common.by import By

        self.driver.find_elements(By.CSS_SELECTOR, selector)[index].click()

    def drag(self, selector: str, dx: int) -> None:
        from selenium.webdriver.common.action_chains import ActionChains
        from selenium.webdriver.common.by import By

        knob = self.driver.find_element(By.CSS_SELECTOR, selector)
        ActionChains(self.driver).click_and_hold(knob).move_by_offset(dx, 0).release().perform()

    def press(self, selector: str, *keys: str) -> None:
        from selenium.webdriver.common.by import By

        self.driver.find_element(By.CSS_SELECTOR, selector).send_keys(*keys)

    def until(self, expression: str, limit_s: float = PATIENCE_S) -> None:
        end = time.monotonic() + limit_s
        while not self.ask(expression):
            assert time.monotonic() < end, f"never: {expression}\n{self.complaints()}"
            time.sleep(0.05)

    def complaints(self) -> list[str]:
        """What the console was told since it was last asked."""
        return [entry["message"] for entry in self.driver.get_log("browser")]


@contextlib.contextmanager
def browser(width: int = 1366, height: int = 768) -> Iterator[Browser]:
    from selenium import webdriver
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service

    options = Options()
    options.binary_location = str(shutil.which("chromium"))
    flags = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage")
    for flag in (*flags, f"--window-size={width},{height}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(str(shutil.which("chromedriver"))))
    try:
        yield Browser(driver)
    finally:
        driver.quit()
