"""One notebook, open in JupyterLab in a browser page."""

from __future__ import annotations

from pathlib import Path

from playwright.sync_api import Page
from playwright.sync_api import TimeoutError as PageTimeout

# None of it waits by itself: a promise, whatever it comes to, would count as true at once.
READY = """() => {
  const panel = globalThis.jupyterapp?.shell.currentWidget;
  const able = ['notebook:clear-all-cell-outputs', 'runmenu:run-all'];
  return panel?.context?.isReady && panel.sessionContext?.isReady
    && panel.sessionContext.session?.kernel?.status === 'idle'
    && able.every(name => jupyterapp.commands.isEnabled(name));
}"""
KERNEL = "jupyterapp.shell.currentWidget?.sessionContext?.session?.kernel?.status"
# Code cells that have source, and how each stands.
CELLS = """() => [...jupyterapp.shell.currentWidget.content.model.cells]
  .filter(cell => cell.type === 'code' && cell.sharedModel.getSource().trim())
  .map(cell => ({
    source: cell.sharedModel.getSource(),
    asked: cell.executionState === 'running' || cell.sharedModel.execution_count !== null,
    running: cell.executionState === 'running' || cell.sharedModel.execution_count === null,
    errors: cell.sharedModel.outputs.filter(o => o.output_type === 'error')
      .map(o => o.ename + ': ' + o.evalue),
  }))"""
# Earlier tabs stay in the page, hidden.
FRONT = ".jp-NotebookPanel:not(.lm-mod-hidden) .jp-Notebook"
IDLE = f"() => {KERNEL} === 'idle'"
IMAGES = f"() => [...document.querySelectorAll('{FRONT} .jp-OutputArea img')].map(i => i.src)"
TEXT = """number => [...jupyterapp.shell.currentWidget.content.widgets[number].node
  .querySelectorAll('.jp-OutputArea-output, .jp-MarkdownOutput')].map(o => o.innerText).join('\\n')"""
ERRORS = f"{FRONT} [data-mime-type='application/vnd.jupyter.error']"


class Notebook:
    """What a learner does with an open notebook."""

    def __init__(self, page: Page) -> None:
        self.page = page

    @classmethod
    def open(cls, page: Page, server: str, token: str, path: str) -> Notebook:
        """Open a notebook and wait until its kernel is ready."""
        page.goto(f"{server}lab/tree/{path}?token={token}", wait_until="domcontentloaded")
        return cls(page).on(path)  # tabs of before are opened again, and are ready first

    def run_all(self, timeout_s: int) -> None:
        """Clear what was stored, then run all cells from the menu and wait for the last one."""
        self.page.evaluate("() => jupyterapp.commands.execute('notebook:clear-all-cell-outputs')")
        self.wait_for(f"() => !({CELLS})().some(cell => cell.asked)", 300)
        self.page.locator(f"{FRONT} .jp-Cell").first.click()  # the menu acts on what has focus
        self.page.locator(".lm-MenuBar-item", has_text="Run").click()
        # By command: the label of this entry changes between versions of JupyterLab.
        self.page.locator(".lm-Menu-item[data-command='runmenu:run-all']").click()
        self.wait_for(f"() => ({CELLS})().some(cell => cell.asked)", 300)
        finished = f"({CELLS})().every(cell => !cell.running) && ({IDLE})()"
        stopped = f"({CELLS})().some(cell => cell.errors.length)"
        self.wait_for(f"() => ({finished}) || {stopped}", timeout_s)

    def wait_for(self, condition: str, timeout_s: int) -> None:
        """Wait until a function of the page is true.

        Raises:
            AssertionError: After timeout_s seconds, with what kernel and cells were doing.
        """
        try:
            self.page.wait_for_function(condition, timeout=timeout_s * 1000)
        except PageTimeout as late:
            running = [cell["source"] for cell in self.page.evaluate(CELLS) if cell["running"]]
            said = f"kernel {self.page.evaluate(KERNEL)}, {len(running)} cells not done"
            raise AssertionError(f"after {timeout_s} s: {said}, the first {running[:1]}") from late

    def on(self, name: str) -> Notebook:
        """The notebook of that name, once it is open in front and its kernel is ready."""
        in_front = f"globalThis.jupyterapp?.shell.currentWidget?.context?.path.endsWith('{name}')"
        self.page.wait_for_function(f"() => {in_front} && ({READY})()", timeout=300_000)
        return Notebook(self.page)

    def cell_with(self, source: str) -> int:
        """The number of the first cell whose source has that text."""
        find = "text => jupyterapp.shell.currentWidget.content.widgets.findIndex(" + (
            "cell => cell.model.sharedModel.getSource().includes(text))"
        )
        number = self.page.evaluate(find, source)
        assert number >= 0, f"no cell has {source!r}"
        return number

    def run_by_keys(self, until: int) -> None:
        """Shift+Enter, from the cell that is active, until the cell of that number is."""
        active = "jupyterapp.shell.currentWidget.content.activeCellIndex"
        while (before := self.page.evaluate(active)) < until:
            self.page.keyboard.press("Shift+Enter")
            self.wait_for(f"() => {active} > {before} && ({IDLE})()", 600)

    def edit_by_keys(self, *lines: str) -> None:
        """Type the first lines of the active cell anew, each over the one that stood there."""
        self.page.keyboard.press("Enter")
        self.page.keyboard.press("Control+Home")
        for line in lines:
            for key in ("Home", "Shift+End"):
                self.page.keyboard.press(key)
            self.page.keyboard.insert_text(line)
            self.page.keyboard.press("ArrowDown")
        self.page.keyboard.press("Escape")

    def replace_by_keys(self, text: str) -> None:
        """Paste a text over the whole active cell, as people do with an answer."""
        for key in ("Enter", "Control+a"):
            self.page.keyboard.press(key)
        self.page.keyboard.insert_text(text)
        self.page.keyboard.press("Escape")

    def go_to(self, number: int) -> None:
        """Click beside a cell, so that the keys are its."""
        cell = self.page.locator(f"{FRONT} .jp-Cell").nth(number)
        cell.locator(".jp-InputPrompt").first.click()

    def follow(self, target: str) -> None:
        """Click the first link to a file in the text."""
        self.page.locator(f"{FRONT} a[href*='{target}']").first.click()

    def text_of(self, number: int) -> str:
        """What a learner reads of a cell: its text or its outputs."""
        return self.page.evaluate(TEXT, number)

    def save(self) -> None:
        """Control+S, until nothing is left to save."""
        self.page.keyboard.press("Control+s")
        self.wait_for("() => !jupyterapp.shell.currentWidget.context.model.dirty", 60)

    def errors(self) -> list[str]:
        """Error outputs of the cells, and those that widgets show."""
        of_cells = [error for cell in self.page.evaluate(CELLS) for error in cell["errors"]]
        return of_cells + self.page.locator(ERRORS).all_inner_texts()

    def images(self) -> list[str]:
        """The addresses of all images in outputs; their bytes are part of the address."""
        return self.page.evaluate(IMAGES)

    def move_first_slider(self) -> None:
        """Press the right arrow on the first slider and wait until a figure has changed."""
        handle = self.page.locator(f"{FRONT} .widget-slider .noUi-handle").first
        handle.scroll_into_view_if_needed()
        before = self.images()
        handle.focus()
        self.page.keyboard.press("ArrowRight")
        changed = f"before => JSON.stringify(({IMAGES})()) !== JSON.stringify(before)"
        self.page.wait_for_function(changed, arg=before, timeout=300_000)
        self.wait_for(IDLE, 300)
        handle.evaluate("element => element.scrollIntoView({block: 'start'})")

    def screenshot(self, path: Path) -> None:
        """Keep what stands in the window."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=path)
