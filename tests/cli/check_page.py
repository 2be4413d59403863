"""Open pages from disk in headless Chromium: no console message, no request, nothing wider than the screen; screenshots.

    python tests/cli/check_page.py runs/page PAGE.html [PAGE.html ...]

Needs Debian's `chromium` (or a browser named by CHROMIUM) and `pip install playwright`, which drives it; no other browser
is downloaded. `make check-page` makes pages of its own first. Exit code 1 says what is wrong.
"""

import os
import shutil
import sys
from pathlib import Path

#: Width, height, and whether it is a phone.
SCREENS = {"desktop": (1280, 900, False), "phone": (375, 812, True)}
#: Everything that a figure of ours must have drawn.
DRAWN = "() => [...document.querySelectorAll('.figure')].map(f => f.querySelectorAll('.main-svg .trace').length)"
TOO_WIDE = "() => document.documentElement.scrollWidth - document.documentElement.clientWidth"


def browser_path() -> str:
    """Return the browser, or end with what to install."""
    for name in (os.environ.get("CHROMIUM"), "chromium", "chromium-browser", "google-chrome"):
        found = name and shutil.which(name)
        if found:
            return found
    sys.exit("check-page needs a browser: apt-get install chromium, or set CHROMIUM to the path of one")


def check(browser, page_file: Path, screen: str, out: Path) -> list[str]:
    """Open one page on one screen and return what is wrong."""
    width, height, phone = SCREENS[screen]
    context = browser.new_context(
        viewport={"width": width, "height": height}, is_mobile=phone, has_touch=phone, device_scale_factor=2 if phone else 1
    )
    page = context.new_page()
    wrong: list[str] = []
    address = page_file.resolve().as_uri()
    page.on("console", lambda message: wrong.append(f"console: {message.text}"))
    page.on("pageerror", lambda error: wrong.append(f"error: {error}"))
    page.on("request", lambda request: None if request.url == address else wrong.append(f"request: {request.url[:200]}"))
    page.goto(address, wait_until="load")
    page.wait_for_timeout(800)
    figures = page.evaluate(DRAWN)
    if not figures or 0 in figures:
        wrong.append(f"figures without traces: {figures}")
    page.screenshot(path=out / f"{page_file.stem}-{screen}.png", full_page=True)
    if page.evaluate(TOO_WIDE) > 0:
        wrong.append(f"{page.evaluate(TOO_WIDE)} pixels wider than the screen")
    wrong += hover(page, out / f"{page_file.stem}-{screen}-hover.png", phone)
    context.close()
    return [f"{page_file.name}, {screen}: {line}" for line in wrong]


def hover(page, picture: Path, phone: bool) -> list[str]:
    """Point at a segment of the drawn step, then show tokens instead of time; return what is wrong."""
    figure = page.locator(".figure", has=page.locator(".updatemenu-button")).first
    if not figure.count():
        return []
    figure.scroll_into_view_if_needed()
    box = figure.locator(".bars .point path").first.bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    if phone:
        page.touchscreen.tap(x, y)
    else:
        page.mouse.move(x - 1, y)
        page.mouse.move(x, y)
    page.wait_for_timeout(300)
    text = figure.locator(".hoverlayer .hovertext").first.text_content() if figure.locator(".hovertext").count() else ""
    page.screenshot(path=picture)
    wrong = [] if "sample" in text and "tokens" in text else [f"hovering a segment shows {text!r}"]
    button = figure.locator(".updatemenu-button", has_text="tokens")
    (button.tap if phone else button.click)()
    page.wait_for_timeout(600)
    page.screenshot(path=picture.with_name(picture.name.replace("hover", "tokens")))
    title = figure.locator(".xtitle").text_content()
    return wrong if "tokens" in title else [*wrong, f"after a click on 'tokens' the axis says {title!r}"]


def main() -> int:
    """Check all pages on all screens."""
    path = browser_path()
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        sys.exit("check-page needs playwright: pip install playwright")
    out, pages = Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]]
    out.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        wrong = [line for page in pages for screen in SCREENS for line in check(browser, page, screen, out)]
        browser.close()
    print(
        "\n".join(wrong)
        or f"{len(pages)} pages on {len(SCREENS)} screens: no console message, no request; screenshots in {out}"
    )
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
