"""The documentation as a person uses it, in a real browser, and as a fuzzer does, against every promise in it."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.served import PROFILES, QUIET_LIMITS, ROOT, Served, Start, tally, token_for

pytestmark = pytest.mark.spec("CORE-18")

UNLABELLED = """() => [...document.querySelectorAll("input, textarea, button")]
  .filter((node) => !node.labels?.length && !node.textContent.trim())
  .filter((node) => !node.ariaLabel && !node.getAttribute("aria-labelledby"))
  .map((node) => node.outerHTML)"""

# The lowest contrast (WCAG 2) of any text that can be seen.
LOWEST_CONTRAST = """() => {
  const linear = (part) => part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
  const light = (color) => {
    const [red, green, blue] = color.match(/[\\d.]+/g).map((part) => linear(part / 255));
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
  };
  const ground = (node) => {
    const color = getComputedStyle(node).backgroundColor;
    return /, 0\\)$|transparent/.test(color) ? ground(node.parentElement) : color;
  };
  const contrast = (node) => {
    const [one, other] = [light(getComputedStyle(node).color), light(ground(node))];
    return (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
  };
  const texts = document.querySelectorAll("h2, h3, p, label, code, small, .verb, button, summary, nav span");
  return Math.min(...[...texts].filter((node) => node.offsetParent).map(contrast));
}"""


@pytest.fixture
def browser() -> Iterator[Any]:
    """A real Chromium."""
    if not Path("/usr/bin/chromium").exists():
        reason = "there is no /usr/bin/chromium; tests/servers/install installs it"
        if os.environ.get("CI"):
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        yield opened
        opened.close()


class Tab:
    """The page of the documentation, and everything that the browser complained about."""

    def __init__(self, browser: Any, url: str) -> None:
        self.page = browser.new_context().new_page()
        self.complaints: list[str] = []
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on(
            "console", lambda line: self.complaints.append(line.text) if "Content Security" in line.text else None
        )
        self.page.goto(f"{url}/docs")
        self.page.wait_for_selector("nav a.start")

    def choose(self, operation: str) -> None:
        self.page.click(f"nav a[href='#{operation}']")
        self.page.wait_for_selector("#go")

    def send(self) -> str:
        self.page.click("#go")
        self.page.wait_for_selector("#go:not([aria-disabled])")
        return str(self.page.text_content("#answer"))


def test_a_person_makes_a_call_on_the_page(shared: Served, browser: Any) -> None:
    tab = Tab(browser, shared.url)
    tab.choose("post_v1_tallies")
    assert "401" in tab.send()
    assert "needs a token" in tab.page.text_content("#notice")
    tab.page.fill("#token", shared.token)
    tab.page.fill("#body", '{"items": [{"key": "browser", "add": 9007199254740993}]}')
    assert "200 OK" in tab.send()
    assert "9007199254740993" in tab.page.text_content("#answer pre")  # not rounded
    assert tally(shared, shared.token, "browser") == (9007199254740993, 1)
    curl = tab.page.text_content("#curl")
    assert f"curl -i -X POST '{shared.url}/v1/tallies'" in curl
    assert shared.token not in curl
    assert tab.page.evaluate("() => localStorage.length + document.cookie.length") == 0
    tab.choose("put_v1_tallies_key")
    tab.page.fill("#p-path-key", "browser/2")
    tab.page.fill("#p-header-If-Match", '"0"')
    assert "200 OK" in tab.send()
    tab.page.fill("#p-header-If-Match", '"5"')
    assert "version-stale" in tab.send()
    assert tally(shared, shared.token, "browser/2") == (1, 1)
    assert tab.complaints == []


def test_the_curl_line_of_the_page_does_what_the_page_does(shared: Served, browser: Any) -> None:
    tab = Tab(browser, shared.url)
    tab.choose("post_v1_tallies")
    tab.page.fill("#body", """{"items": [{"key": "it's \\"quoted\\" $HOME `id`", "add": 1}]}""")
    line = tab.page.text_content("#curl")
    environ = {**os.environ, "KEYFOLD_TOKEN": shared.token}
    ran = subprocess.run(["bash", "-c", line], capture_output=True, text=True, env=environ, check=True)
    assert "HTTP/1.1 200" in ran.stdout
    assert tally(shared, shared.token, 'it\'s "quoted" $HOME `id`') == (1, 1)


def test_a_tab_left_open_says_what_to_do_when_the_server_has_gone_and_works_when_it_is_back(
    start: Start, browser: Any, tmp_path: Path
) -> None:
    served = start()
    port = str(served.address[1])
    token = token_for(f"sqlite:///{tmp_path / 'keyfold.db'}")
    tab = Tab(browser, served.url)
    tab.page.fill("#token", token)
    tab.choose("post_v1_tallies_read")
    served.stop()
    assert "No answer" in tab.send()
    tab.page.wait_for_selector("#notice:not([hidden])")
    assert "does not answer" in tab.page.text_content("#notice")
    start("--port", port)
    tab.page.click("#notice button")
    tab.page.wait_for_selector("#notice", state="hidden")
    assert "200 OK" in tab.send()


def test_a_tab_whose_token_has_ended_says_so(shared: Served, browser: Any) -> None:
    tab = Tab(browser, shared.url)
    tab.page.fill("#token", "kf_000000000000_ended")
    tab.choose("post_v1_tallies_read")
    assert "401" in tab.send()
    assert "does not take this token" in tab.page.text_content("#notice")
    tab.page.fill("#token", shared.token)
    assert "200 OK" in tab.send()
    assert tab.page.is_hidden("#notice")


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 1280), ("light", 360)])
def test_the_page_fits_and_can_be_read(shared: Served, browser: Any, scheme: str, width: int) -> None:
    page = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme).new_page()
    page.goto(f"{shared.url}/docs#put_v1_tallies_key")
    page.wait_for_selector("#go")
    assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
    assert page.evaluate(UNLABELLED) == []
    assert page.evaluate(LOWEST_CONTRAST) >= 4.5


@pytest.mark.timeout(400)
def test_a_fuzz_run_of_the_whole_api_finds_nothing(start: Start, tmp_path: Path) -> None:
    served = start("--no-work", **QUIET_LIMITS, **PROFILES)
    token = token_for(f"sqlite:///{tmp_path / 'keyfold.db'}")
    here = Path(__file__).parent
    ran = subprocess.run(
        [
            str(Path(sys.executable).with_name("schemathesis")),
            "--config-file",
            str(here / "schemathesis.toml"),
            "run",
            f"{served.url}/openapi.json",
            "--checks=all",
            "--seed=1",
            "--max-examples=15",
            "--continue-on-failure",
            f"--header=Authorization: Bearer {token}",
        ],
        cwd=tmp_path,
        env={**os.environ, "SCHEMATHESIS_HOOKS": "tests.acceptance.fuzz_hooks", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout
    assert "Tested: 54" in ran.stdout
    assert served.call("GET", "/readyz").status_code == 200
    assert "failed unexpectedly" not in served.log
