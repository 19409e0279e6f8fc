"""The page in a browser: it chats, streams, stops, and shows what a model writes as text.

Opt-in: runs where playwright and a Chromium are installed.
"""

import shutil
import time

import pytest

browser = pytest.importorskip("playwright.sync_api")
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")


@pytest.fixture(scope="module")
def chromium():
    with browser.sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield made
        made.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_chat(scheme, chromium, server, monkeypatch):
    page, wrong = chromium.new_page(color_scheme=scheme), []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda told: wrong.append(told.text) if told.type == "error" else None)
    page.goto(server.url)
    page.fill("#prompt", "<img src=x>")
    page.keyboard.press("Enter")
    page.wait_for_selector(".said.assistant:not(.busy)")
    assert page.locator(".said.user").text_content() == "<img src=x>"
    assert page.locator("#log img").count() == 0
    assert "tokens/s" in page.locator(".facts").text_content()
    assert "tiny" in page.locator("#model").text_content()

    inner = server.llm.engine.step

    def slow():
        time.sleep(0.05)
        return inner()

    monkeypatch.setattr(server.llm.engine, "step", slow)
    page.click("#clear")
    page.fill("#prompt", "again")
    page.click("#send")
    page.wait_for_selector("#stop:visible")
    page.wait_for_timeout(500)
    page.click("#stop")
    page.wait_for_selector("#send:visible")
    assert "stopped" in page.locator(".facts").text_content()
    assert server.settle() == 0 and wrong == []
    page.close()
