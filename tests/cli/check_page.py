"""Open pages from disk in headless Chromium: no console message, no request, nothing wider than the screen; screenshots.

    make check-page                                        # pages of its own
    python tests/cli/check_page.py OUT [PAGE.html ...]     # the same, or given pages; screenshots go to OUT

Needs Debian's `chromium` (or a browser named by CHROMIUM) and `pip install playwright`, which drives it; no other browser
is downloaded. Exit code 1 says what is wrong.
"""

import os
import shutil
import sys
from pathlib import Path

import numpy as np

#: Width, height, and whether it is a phone.
SCREENS = {"desktop": (1280, 900, False), "phone": (375, 812, True)}
#: Everything that a figure of ours must have drawn.
DRAWN = "() => [...document.querySelectorAll('.figure')].map(f => f.querySelectorAll('.main-svg .trace').length)"
TOO_WIDE = "() => document.documentElement.scrollWidth - document.documentElement.clientWidth"


def make_pages(out: Path) -> list[Path]:
    """Write the page of `evenpack plan`, few ranks and many, and one of two runs side by side."""
    from evenpack.cli.main import run
    from evenpack.cli.page import Curve, DrawnStep, PageData, RunView, Table, write_page
    from evenpack.cli.what_if.workloads import WORKLOADS
    from evenpack.scheduler.plan import PlanConfig, plan_step

    pages = [out / "few-ranks.html", out / "many-ranks.html", out / "two-runs.html"]
    for page, more in zip(pages, (["workload:image-text", "--ranks", "8", "--sync", "microbatch"],
                                  ["workload:sft", "--ranks", "96", "--samples-per-step", "32"]), strict=False):  # fmt: skip
        if run(["plan", *more, "--html", str(page)]):
            sys.exit("evenpack plan failed")
    runs = []
    for name, sync in (("bimodal", "step"), ("rl", "microbatch")):
        workload = WORKLOADS[name](np.random.default_rng(0), 12, 8)
        config = PlanConfig(max_tokens=workload.capacity, sync=sync)
        plan = plan_step(workload.table, num_ranks=12, config=config)
        ids = [f"<b>{name}</b> & </script> {row}" for row in range(len(workload.table))]
        figures = Table(title="Figures", header=("", "value"), rows=(("imbalance", f"{plan.imbalance:.3f}"),))
        curve = Curve(name="evenpack", values=np.linspace(0.9, 1, 5000), first_step=100)
        drawn = DrawnStep(title="Step 7", table=workload.table, plan=plan, config=config, ids=ids)
        before = np.bincount(workload.table.home, workload.table.cost)
        runs.append(RunView(name=name, facts=("A run.",), tables=(figures,), curves=(curve,), load_before=before,
                            load_after=plan.cost.sum(axis=(1, 2)), drawn=drawn, lengths=workload.table.tokens))  # fmt: skip
    write_page(pages[2], PageData(title="Two runs, side by side", runs=tuple(runs), summary=("A page for the check.",)))
    return pages


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
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    pages = [Path(name) for name in sys.argv[2:]] or make_pages(out)
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
