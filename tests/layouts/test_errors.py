"""What takes long is said, what does not is not."""

import time

from kconvert.layouts.errors import said_if_slow


def test_only_what_is_slow_is_said(caplog) -> None:
    with said_if_slow("a quick thing", 0.2):
        pass
    with said_if_slow("100 % slow", 0.05):
        time.sleep(0.3)
    time.sleep(0.2)
    assert caplog.messages == ["100 % slow"]
