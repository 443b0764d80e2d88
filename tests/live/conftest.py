"""A browser for the tests of the live page."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.browser import Page, missing, open_page


@pytest.fixture(scope="session")
def browser() -> Iterator[Page]:
    """One browser for all tests."""
    reason = missing()
    if reason:
        pytest.skip(reason)
    with open_page() as page:
        yield page


@pytest.fixture
def page(browser: Page) -> Iterator[Page]:
    """An empty page in the usual window, which must end without a problem."""
    browser.goto("about:blank")
    browser.media()
    browser.resize(1440)
    yield browser
    assert browser.problems() == []
