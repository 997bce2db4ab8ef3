"""The page in a real browser: it sorts by click and by keyboard, in light and dark, and asks for nothing else."""

import json
import shutil
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from hesscore.pages.page import page
from tests.command import ROOT

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="no Chromium")]

ARGUMENTS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    folder = tmp_path_factory.mktemp("browser")
    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for argument in (*ARGUMENTS, f"--user-data-dir={folder / 'profile'}"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options, Service(str(DRIVER)))
    content = json.loads((ROOT / "sample_runs/pydoc/report-end.json").read_text())
    (folder / "report.html").write_text(page(content))
    driver.get_log("performance")  # what Chromium asks itself for at its start
    driver.get(f"file://{folder / 'report.html'}")
    yield driver
    driver.quit()


def table(browser: Any, title: str) -> Any:
    heading = browser.find_element(By.ID, f"{title}-table")
    return heading.find_element(By.XPATH, "..").find_element(By.TAG_NAME, "table")


def head(table: Any, column: str) -> Any:
    return next(th for th in table.find_elements(By.TAG_NAME, "th") if th.text.split(" ")[0] == column)


def keys(table: Any, column: str) -> list[float | None]:
    names = [th.text.split(" ")[0] for th in table.find_elements(By.TAG_NAME, "th")]
    cells = table.find_elements(By.CSS_SELECTOR, f"tbody td:nth-child({names.index(column) + 1})")
    found = [cell.get_attribute("data-key") for cell in cells]
    return [None if key is None else float(key) for key in found]


def falling(values: list[float | None]) -> bool:
    """From large to small, and what is missing last."""
    known = [value for value in values if value is not None]
    return values == sorted(known, reverse=True) + [None] * (len(values) - len(known))


def test_a_click_on_a_head_sorts_by_all_digits(browser):
    blocks = table(browser, "blocks")
    before = keys(blocks, "lambda_max")
    button = head(blocks, "lambda_max").find_element(By.TAG_NAME, "button")
    browser.execute_script("arguments[0].scrollIntoView()", button)
    button.click()
    assert head(blocks, "lambda_max").get_attribute("aria-sort") == "descending"
    assert falling(keys(blocks, "lambda_max"))
    button.click()
    assert head(blocks, "lambda_max").get_attribute("aria-sort") == "ascending"
    after = keys(blocks, "lambda_max")
    assert falling([None if value is None else -value for value in after])
    assert sorted(map(str, after)) == sorted(map(str, before))


def test_so_does_the_keyboard(browser):
    norms = table(browser, "norms")
    button = head(norms, "curvature_peak").find_element(By.TAG_NAME, "button")
    button.send_keys(Keys.ENTER)
    assert head(norms, "curvature_peak").get_attribute("aria-sort") == "descending"
    assert head(norms, "layer").get_attribute("aria-sort") == "none"
    assert falling(keys(norms, "curvature_peak"))
    head(norms, "norm").find_element(By.TAG_NAME, "button").send_keys(Keys.SPACE)
    names = [row.text.split()[1] for row in norms.find_elements(By.CSS_SELECTOR, "tbody tr")]
    assert names == sorted(names)


def colours(browser: Any) -> tuple[str, str]:
    body = browser.find_element(By.TAG_NAME, "body")
    return body.value_of_css_property("background-color"), body.value_of_css_property("color")


def test_dark_is_dark_and_text_in_figures_goes_with_it(browser):
    seen = {}
    for scheme in "light", "dark":
        features = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", features)
        text = browser.find_element(By.CSS_SELECTOR, "figure svg text")
        seen[scheme] = (*colours(browser), text.value_of_css_property("fill"))
    assert seen["light"] == ("rgba(255, 255, 255, 1)", "rgba(27, 31, 36, 1)", "rgb(27, 31, 36)")
    assert seen["dark"] == ("rgba(15, 20, 25, 1)", "rgba(230, 237, 243, 1)", "rgb(230, 237, 243)")


def test_a_phone_shows_it_without_scrolling_sideways(browser):
    size = {"width": 400, "height": 800, "deviceScaleFactor": 1, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    width = browser.execute_script("return document.documentElement.scrollWidth")
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    assert width <= 400


def test_nothing_goes_wrong_and_nothing_is_asked_for(browser):
    assert browser.get_log("browser") == []
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]
    assert [url for url in asked if not url.startswith(("file:", "data:", "chrome:"))] == []
    assert any(url.startswith("file:") for url in asked)
